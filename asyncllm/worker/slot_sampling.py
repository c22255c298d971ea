"""The host's record of each slot's sampling features, so that plain rows cost nothing.

The features of a step's rows choose between the captured sampler, which reads temperature, filters
and penalties on the device, and full sampling. State on the device (parameters, token counts,
allowed tokens) is packed when a sequence takes its slot. Edits that depend on the tokens so far
(bad words, stop tokens before min_tokens) are packed per step.
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
    """The logit edits of a slot's sequence."""

    seq: Sequence
    tokens: np.ndarray  # int32, to edit in every step
    values: np.ndarray  # f32, to add to their logits

    @classmethod
    def of(cls, seq: Sequence) -> _SlotMemory:
        bias = seq.request.sampling_params.logit_bias or {}
        banned = [word[0] for word in seq.request.bad_words_ids if len(word) == 1]
        tokens = int32([*bias, *banned])
        values = np.array([*bias.values(), *([NEVER] * len(banned))], np.float32)
        return cls(seq, tokens, values)


class SlotSampling:
    def __init__(self, num_slots: int) -> None:
        self._features = np.zeros(num_slots, np.int32)  # of the last sequence in each slot
        self._memory: dict[int, _SlotMemory] = {}  # slots with EDIT

    def features(self, slots: np.ndarray) -> int:
        """All `Feature`s that these slots need."""
        return int(np.bitwise_or.reduce(self._features[slots], initial=NO_FEATURE))

    def init(self, inits: tuple[SlotInit, ...]) -> SamplingExtras[np.ndarray]:
        """Note the features of sequences that take slots; pack state that their records lack."""
        # A slot that had allowed tokens, and has none any more, must be cleared.
        restricted = [i for i in inits if self._remember(i) & Feature.ALLOWED]
        penalised = [i for i in inits if i.seq.request.sampling_params.penalises]
        if not restricted and not penalised:  # the usual case
            return NO_EXTRAS
        return SamplingExtras(
            prompt_tokens=_of_requests(penalised, lambda r: np.unique(int32(r.prompt_token_ids))),
            output_tokens=_slot_tokens(penalised, [int32(_counted(init)) for init in penalised]),
            allowed=_of_requests(
                restricted, lambda r: int32(r.sampling_params.allowed_token_ids or [])
            ),
        )

    def _remember(self, init: SlotInit) -> int:
        """Note the features of a slot's new sequence. Returns them and those of the slot's last
        sequence."""
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
        """Logit bias, bad words, stop tokens before min_tokens, and forced tokens of these rows."""
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
    """Tokens that are forbidden next: stop tokens before min_tokens, last tokens of bad words.

    The token to sample counts as in flight already.
    """
    request = seq.request
    num_before = seq.num_tokens - 1 - seq.num_prompt_tokens
    forbidden: list[int] = []
    if num_before < request.sampling_params.min_tokens:
        forbidden += request.stop_token_ids
    for word in request.bad_words_ids:
        start = len(word) - 1
        # Rows with words of several tokens are host rows, so all their tokens are known here.
        if 0 < start <= seq.num_output_tokens and tuple(seq.token_ids[-start:]) == word[:-1]:
            forbidden.append(word[-1])
    return forbidden


def _forced_now(seq: Sequence) -> int | None:
    return None if seq.forcer is None else seq.forcer(seq.token_ids)


def _counted(init: SlotInit) -> list[int]:
    """Its output tokens, without the input of its next decode step, which that step counts."""
    seq = init.seq
    decodes = init.num_computed >= seq.num_prefill
    return init.token_ids[seq.num_prompt_tokens : len(init.token_ids) - decodes]


def _of_requests(
    inits: list[SlotInit], convert: Callable[[Request], np.ndarray]
) -> SlotTokens[np.ndarray] | None:
    """A token list for each sequence. Forks share their request's list, so it is made once."""
    requests = {init.seq.request.request_id: init.seq.request for init in inits}
    lists = {name: convert(request) for name, request in requests.items()}
    return _slot_tokens(inits, [lists[init.seq.request.request_id] for init in inits])


def _slot_tokens(inits: list[SlotInit], lists: list[np.ndarray]) -> SlotTokens[np.ndarray] | None:
    """None without `inits`. A list may be as long as the vocabulary."""
    if not inits:
        return None
    slots = int32([init.slot for init in inits])
    return SlotTokens(slots, slots.repeat([len(ids) for ids in lists]), np.concatenate(lists))


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)
