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
from asyncllm.worker.packed_step import (
    NO_EXTRAS,
    NO_FEATURE,
    NO_ROWS,
    Feature,
    LogitEdits,
    SamplingExtras,
    SlotTokens,
)

NEVER = float("-inf")
_NO_VALUES = np.zeros(0, np.float32)


@dataclass(slots=True)
class _SlotMemory:
    """The host's memory of one slot, where it is not plain."""

    seq: Sequence
    tokens: np.ndarray  # int32, edited in every step
    values: np.ndarray  # f32, what is added to them

    @classmethod
    def of(cls, seq: Sequence) -> _SlotMemory:
        bias = seq.request.sampling_params.logit_bias or {}
        banned = [word[0] for word in seq.request.bad_words_ids if len(word) == 1]
        tokens = int32([*bias, *banned])
        values = np.array([*bias.values(), *([NEVER] * len(banned))], np.float32)
        return cls(seq, tokens, values)


class SlotSampling:
    def __init__(self, num_slots: int) -> None:
        self._features = np.zeros(num_slots, np.int32)  # of the sequences that took the slots last
        self._memory: dict[int, _SlotMemory] = {}  # of slots with EDIT

    def features(self, slots: np.ndarray) -> int:
        """`Feature`s, all that any of these slots needs."""
        return int(np.bitwise_or.reduce(self._features[slots], initial=NO_FEATURE))

    def init(self, inits: tuple[SlotInit, ...]) -> SamplingExtras[np.ndarray]:
        """Sequences take slots: remember what they need, pack what is not in their records."""
        # A slot that was restricted and is no more needs its row cleared as well.
        restricted = [i for i in inits if self._remember(i) & Feature.ALLOWED]
        penalised = [i for i in inits if i.seq.request.sampling_params.penalises]
        if not restricted and not penalised:  # as in most batches
            return NO_EXTRAS
        return SamplingExtras(
            prompt_tokens=_of_requests(penalised, lambda r: np.unique(int32(r.prompt_token_ids))),
            output_tokens=_slot_tokens(penalised, [int32(_counted(init)) for init in penalised]),
            allowed=_of_requests(
                restricted, lambda r: int32(r.sampling_params.allowed_token_ids or [])
            ),
        )

    def _remember(self, init: SlotInit) -> int:
        """Note which features the slot's new sequence uses. Returns them and those that the slot's
        sequence before it used."""
        request, slot = init.seq.request, init.slot
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
        if slot in self._memory:
            del self._memory[slot]
        is_edited = params.logit_bias or params.min_tokens or request.bad_words_ids
        if is_edited or init.seq.forcer is not None:
            features |= Feature.EDIT
            self._memory[slot] = _SlotMemory.of(init.seq)
        used: int = features | self._features[slot]
        self._features[slot] = features
        return used

    def logit_edits(self, slots: np.ndarray) -> LogitEdits[np.ndarray]:
        """Bias, bad words, stop tokens before min_tokens, and forced tokens, of these rows."""
        places = [(row, self._memory.get(slot)) for row, slot in enumerate(slots.tolist())]
        edited = [(row, memory) for row, memory in places if memory is not None]
        tokens: list[np.ndarray] = [NO_ROWS]
        values: list[np.ndarray] = [_NO_VALUES]
        for _, memory in edited:
            forbidden = int32(_forbidden_now(memory.seq))
            tokens.append(np.concatenate([memory.tokens, forbidden]))
            values += [memory.values, np.full(len(forbidden), NEVER, np.float32)]
        rows = int32([row for row, _ in edited])
        forced = [(row, _forced_now(memory.seq)) for row, memory in edited]
        forced = [(row, token) for row, token in forced if token is not None]
        return LogitEdits(
            rows.repeat(np.array([len(ids) for ids in tokens[1:]], np.int64)),
            np.concatenate(tokens),
            np.concatenate(values),
            *np.array(forced, np.int32).reshape(-1, 2).T.copy(),
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


def _of_requests(
    inits: list[SlotInit], convert: Callable[[Request], np.ndarray]
) -> SlotTokens[np.ndarray] | None:
    """A list of each sequence's request, which forks share: it is converted once."""
    requests = {init.seq.request.request_id: init.seq.request for init in inits}
    lists = {name: convert(request) for name, request in requests.items()}
    return _slot_tokens(inits, [lists[init.seq.request.request_id] for init in inits])


def _slot_tokens(inits: list[SlotInit], lists: list[np.ndarray]) -> SlotTokens[np.ndarray] | None:
    """None for none. A list may be as long as the vocabulary."""
    if not inits:
        return None
    slots = int32([init.slot for init in inits])
    return SlotTokens(slots, slots.repeat([len(ids) for ids in lists]), np.concatenate(lists))


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)
