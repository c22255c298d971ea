"""The host's memory of each slot's sampling, so that plain rows cost nothing.

Which features a step needs decides between the captured sampler, which knows temperature, filters
and penalties from the device alone, and the full one. What changes on the device (parameters,
penalty counts, allowed tokens) is packed when a sequence takes its slot; what depends on the tokens
so far (bad words, stop tokens before min_tokens) is packed per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncllm.step_plan import SlotInit
from asyncllm.types import Request, Sequence
from asyncllm.worker.packed_step import NO_FEATURE, AllowedInit, Feature, LogitEdits, PenaltyInit

NEVER = float("-inf")
_NO_TOKENS, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0, np.float32)


@dataclass(slots=True)
class _SlotMemory:
    """The host's memory of one slot, where it is not plain."""

    seq: Sequence
    tokens: np.ndarray  # int64, edited in every step
    values: np.ndarray  # f32, what is added to them

    @classmethod
    def of(cls, seq: Sequence) -> _SlotMemory:
        bias = seq.request.sampling_params.logit_bias or {}
        banned = [word[0] for word in seq.request.bad_words_ids if len(word) == 1]
        tokens = np.array([*bias, *banned], np.int64)
        values = np.array([*bias.values(), *([NEVER] * len(banned))], np.float32)
        return cls(seq, tokens, values)


class SlotSampling:
    def __init__(self, num_slots: int) -> None:
        self._features = np.zeros(num_slots, np.int32)
        self._special: dict[int, Feature] = {}  # of slots that have any
        self._memory: dict[int, _SlotMemory] = {}  # of slots with EDIT
        self._restricted: set[int] = set()  # slots whose row of `allowed` is not empty

    def features(self, slots: np.ndarray) -> Feature:
        """All that any of these slots needs."""
        if not self._special:  # as in most batches
            return NO_FEATURE
        return Feature(int(np.bitwise_or.reduce(self._features[slots], initial=0)))

    def init(
        self, inits: tuple[SlotInit, ...]
    ) -> tuple[PenaltyInit[np.ndarray] | None, AllowedInit[np.ndarray] | None]:
        """Sequences take slots: remember what they need, pack what is not in their records."""
        for init in inits:
            self._remember(init)
        penalised = [init for init in inits if init.seq.request.sampling_params.penalises]
        penalties = _penalty_init(penalised) if penalised else None
        if not self._special and not self._restricted:  # as in most batches
            return penalties, None
        special = [(i, self._special[i.slot]) for i in inits if i.slot in self._special]
        restricted = {i.slot for i, features in special if features & Feature.ALLOWED}
        # A slot that was restricted and is no more needs its row cleared as well.
        changed = [i for i in inits if i.slot in restricted | self._restricted]
        self._restricted = (self._restricted - {i.slot for i in inits}) | restricted
        return penalties, _allowed_init(changed) if changed else None

    def _remember(self, init: SlotInit) -> None:
        """Note which features the slot's new sequence uses, forgetting those of the one before."""
        request = init.seq.request
        params = request.sampling_params
        features = NO_FEATURE
        if params.allowed_token_ids is not None:
            features |= Feature.ALLOWED
        if params.num_logprobs is not None:
            features |= Feature.LOGPROBS
        if init.seq.constraint is not None:
            features |= Feature.MASK
        if request.batch_processors or params.logits_processors:
            features |= Feature.PROCESS
        if init.slot in self._special:
            del self._special[init.slot]
            self._memory.pop(init.slot, None)
            self._features[init.slot] = NO_FEATURE
        is_edited = params.logit_bias or params.min_tokens or request.bad_words_ids
        if is_edited or init.seq.forcer is not None:
            features |= Feature.EDIT
            self._memory[init.slot] = _SlotMemory.of(init.seq)
        if features:
            self._special[init.slot] = self._features[init.slot] = features

    def logit_edits(self, slots: np.ndarray) -> LogitEdits[np.ndarray]:
        """Bias, bad words, stop tokens before min_tokens, and forced tokens, of these rows."""
        places = [(row, self._memory.get(slot)) for row, slot in enumerate(slots.tolist())]
        edited = [(row, memory) for row, memory in places if memory is not None]
        tokens: list[np.ndarray] = [_NO_TOKENS]
        values: list[np.ndarray] = [_NO_VALUES]
        for _, memory in edited:
            forbidden = np.array(_forbidden_now(memory.seq), np.int64)
            tokens.append(np.concatenate([memory.tokens, forbidden]))
            values += [memory.values, np.full(len(forbidden), NEVER, np.float32)]
        rows = np.array([row for row, _ in edited], np.int64)
        forced = [(row, _forced_now(memory.seq)) for row, memory in edited]
        forced = [(row, token) for row, token in forced if token is not None]
        return LogitEdits(
            rows.repeat(np.array([len(ids) for ids in tokens[1:]], np.int64)),
            np.concatenate(tokens),
            np.concatenate(values),
            *np.array(forced, np.int64).reshape(-1, 2).T.copy(),
        )


def _forbidden_now(seq: Sequence) -> list[int]:
    """Tokens that must not come next: stop tokens before min_tokens, ends of bad words.

    The token to be sampled is already counted as in flight.
    """
    request = seq.request
    num_before = seq.num_tokens - 1 - seq.num_prompt_tokens
    forbidden: list[int] = []
    if num_before < request.sampling_params.min_tokens:
        forbidden += request.stop_token_ids
    for word in request.bad_words_ids:
        start = len(word) - 1
        # Rows with longer words are host rows: here all their tokens are known.
        if 0 < start <= seq.num_output_tokens and tuple(seq.token_ids[-start:]) == word[:-1]:
            forbidden.append(word[-1])
    return forbidden


def _forced_now(seq: Sequence) -> int | None:
    return None if seq.forcer is None else seq.forcer(seq.token_ids)


def _counted(init: SlotInit) -> list[int]:
    """Its output tokens, but for the input of its next decode step, which that step counts."""
    seq = init.seq
    decodes = init.num_computed >= seq.num_prefill
    return init.token_ids[seq.num_prompt_tokens : len(init.token_ids) - decodes]


def _penalty_init(inits: list[SlotInit]) -> PenaltyInit[np.ndarray]:
    """Prompt tokens, which forks share, each once; output tokens each time."""
    slots = int32([init.slot for init in inits])
    prompts = _of_requests(inits, lambda request: np.unique(int32(request.prompt_token_ids)))
    outputs = [int32(_counted(init)) for init in inits]
    prompt, output = (
        (slots.repeat([len(ids) for ids in lists]), np.concatenate(lists))
        for lists in (prompts, outputs)
    )
    return PenaltyInit(slots, *prompt, *output)


def _allowed_init(inits: list[SlotInit]) -> AllowedInit[np.ndarray]:
    """A list may be as long as the vocabulary."""
    slots = int32([init.slot for init in inits])
    ids = _of_requests(inits, lambda r: int32(r.sampling_params.allowed_token_ids or []))
    return AllowedInit(slots, slots.repeat([len(each) for each in ids]), np.concatenate(ids))


def _of_requests(
    inits: list[SlotInit], convert: Callable[[Request], np.ndarray]
) -> list[np.ndarray]:
    """An array of each sequence's request, which forks share: it is converted once."""
    requests = {init.seq.request.request_id: init.seq.request for init in inits}
    arrays = {name: convert(request) for name, request in requests.items()}
    return [arrays[init.seq.request.request_id] for init in inits]


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)
