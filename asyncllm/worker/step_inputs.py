"""A `StepPlan` as arrays: everything that the device must be told for one step, packed on the host.

`StepBuilder` keeps what the host must remember of each slot (which sampling features it uses), so
that a step of plain decodes builds nothing but its list of slots. Arrays named `init_*`, `table_*`
and so on are the changes that `DeviceState.apply` writes; forward pass and sampler read the rest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from asyncllm.attention.base import PrefillRows
from asyncllm.types import PrefillRow, Sequence, SlotInit, StepPlan

Arrays = dict[str, np.ndarray]
NEVER = float("-inf")


class Feature(enum.IntFlag):
    """What sampling a slot needs beyond the argmax."""

    RANDOM = 1  # temperature
    FILTER = 2  # top-k, top-p, min-p
    PENALTY = 4
    EDIT = 8  # logit bias, bad words, min_tokens
    ALLOWED = 16
    LOGPROBS = 32


PLAIN = Feature.RANDOM  # what the captured sampler does


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A prefill row that wants logprobs: of the prompt token that follows each of its tokens."""

    seq_id: int
    first_token: int  # in the step's token order
    num_targets: int
    num_top: int

    @property
    def array_name(self) -> str:
        """The uploaded int32 [num_targets] token ids."""
        return f"targets_{self.seq_id}"


@dataclass(frozen=True, slots=True)
class StepInputs:
    plan: StepPlan
    arrays: Arrays
    decode_slots: np.ndarray  # int32 [decodes]
    max_decode_len: int
    prefills: PrefillRows | None
    features: Feature
    num_logprobs: int  # top entries to return for rows with LOGPROBS
    wants_logprobs: tuple[int | None, ...]  # top entries per sampled row; empty: no row wants any
    prompt_logprobs: tuple[PromptLogprobs, ...]


@dataclass(slots=True)
class _SlotMemory:
    """The host's memory of one slot, where it is not plain."""

    seq: Sequence
    bias_tokens: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)


class StepBuilder:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._features = np.zeros(num_slots, np.int32)
        self._memory: dict[int, _SlotMemory] = {}
        self._restricted: set[int] = set()  # slots whose row of `allowed` is not empty

    def build(self, plan: StepPlan) -> StepInputs:
        arrays: Arrays = {}
        if plan.slot_inits:
            self._init_slots(plan.slot_inits, arrays)
        _block_table_entries(plan, arrays)
        decode_slots = np.fromiter((row.slot for row in plan.decodes), np.int32, len(plan.decodes))
        prefills = self._prefills(plan, arrays) if plan.prefills else None
        sampled = plan.sampled
        sampled_slots = decode_slots
        if plan.prefills:
            sampled_slots = np.fromiter((s.slot for s in sampled), np.int32, len(sampled))
        features = Feature(int(np.bitwise_or.reduce(self._features[sampled_slots], initial=0)))
        if features & Feature.EDIT:
            self._logit_edits(plan, sampled_slots, arrays)
        wants: tuple[int | None, ...] = ()
        num_logprobs = 0
        if features & Feature.LOGPROBS:
            params = [seq.request.sampling_params for seq in sampled]
            wants = tuple(p.logprobs for p in params)
            num_logprobs = max(count or 0 for count in wants)
        return StepInputs(
            plan=plan,
            arrays=arrays,
            decode_slots=decode_slots,
            max_decode_len=max((row.position + 1 for row in plan.decodes), default=0),
            prefills=prefills,
            features=features,
            num_logprobs=num_logprobs,
            wants_logprobs=wants,
            prompt_logprobs=_prompt_logprobs(plan, arrays),
        )

    # --- slots -------------------------------------------------------------------------------

    def _init_slots(self, inits: tuple[SlotInit, ...], arrays: Arrays) -> None:
        params = [init.seq.request.sampling_params for init in inits]
        arrays["init_slots"] = _int32([init.slot for init in inits])
        # A sequence that comes back decoding continues from its last token; a prefill ignores it.
        arrays["init_last_tokens"] = _int32([init.token_ids[-1] for init in inits])
        arrays["init_positions"] = _int32([init.num_computed for init in inits])
        arrays["init_prompt_lens"] = _int32([init.seq.num_prompt_tokens for init in inits])
        arrays["init_top_ks"] = _int32([max(p.top_k, 0) for p in params])
        arrays["init_seeds"] = np.array([init.seq.seed for init in inits], np.int64)
        arrays["init_floats"] = np.array(
            [
                [0.0 if p.greedy else p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
                [p.repetition_penalty for p in params],
            ],
            np.float32,
        )
        for init in inits:
            self._remember(init)
        penalised = [i for i in inits if self._features[i.slot] & Feature.PENALTY]
        if penalised:
            _penalty_entries(penalised, arrays)
        restricted = {i.slot for i in inits if self._features[i.slot] & Feature.ALLOWED}
        # A slot that was restricted and is no more needs its row cleared as well.
        changed = [i for i in inits if i.slot in restricted | self._restricted]
        if changed:
            _allowed_entries(changed, arrays)
        self._restricted = (self._restricted - {i.slot for i in inits}) | restricted

    def _remember(self, init: SlotInit) -> None:
        """Note which features the slot's new sequence uses, forgetting those of the one before."""
        request = init.seq.request
        params = request.sampling_params
        features = Feature(0)
        if not params.greedy:
            features |= Feature.RANDOM
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                features |= Feature.FILTER
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            features |= Feature.PENALTY
        if params.allowed_token_ids is not None:
            features |= Feature.ALLOWED
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
        self._memory.pop(init.slot, None)
        if params.logit_bias or params.min_tokens or request.bad_words_ids:
            features |= Feature.EDIT
            memory = _SlotMemory(init.seq)
            for token, bias in (params.logit_bias or {}).items():
                memory.bias_tokens.append(token)
                memory.bias_values.append(bias)
            for word in request.bad_words_ids:
                if len(word) == 1:
                    memory.bias_tokens.append(word[0])
                    memory.bias_values.append(NEVER)
            self._memory[init.slot] = memory
        self._features[init.slot] = features

    # --- rows --------------------------------------------------------------------------------

    def _prefills(self, plan: StepPlan, arrays: Arrays) -> PrefillRows:
        """The arrays of a mixed step's prefill part, and of what it samples."""
        rows = plan.prefills
        lens = np.array([len(row.token_ids) for row in rows], np.int32)
        indptr = _indptr(lens)
        positions = np.concatenate(
            [np.arange(row.start, row.start + n, dtype=np.int32) for row, n in _zip(rows, lens)]
        )
        pages = np.concatenate([np.array(row.block_ids, np.int32) for row in rows])
        page_indptr = _indptr(np.array([len(row.block_ids) for row in rows], np.int32))
        row_pages = page_indptr[:-1].repeat(lens) + positions // self._block_size
        write_slots = pages[row_pages].astype(np.int64) * self._block_size
        arrays["decode_slots"] = _int32([row.slot for row in plan.decodes])
        arrays["prefill_tokens"] = np.concatenate(
            [np.array(row.token_ids, np.int32) for row in rows]
        )
        arrays["prefill_positions"] = positions
        arrays["prefill_prompt_lens"] = _int32([r.seq.num_prompt_tokens for r in rows]).repeat(lens)
        arrays["write_slots"] = write_slots + positions % self._block_size
        kv_lens = np.array([row.start for row in rows], np.int32) + lens
        self._samples(plan, indptr, kv_lens, arrays)
        return PrefillRows(indptr, kv_lens, page_indptr, pages)

    @staticmethod
    def _samples(plan: StepPlan, indptr: np.ndarray, kv_lens: np.ndarray, arrays: Arrays) -> None:
        """Which tokens' hidden states are sampled from, for which slots, at which positions."""
        num_decodes = len(plan.decodes)
        tokens = list(range(num_decodes))
        slots = [row.slot for row in plan.decodes]
        positions = [row.position + 1 for row in plan.decodes]
        for i, row in enumerate(plan.prefills):
            for seq in row.samples:
                tokens.append(num_decodes + int(indptr[i + 1]) - 1)
                slots.append(seq.slot)
                positions.append(int(kv_lens[i]))
        arrays["sample_tokens"] = _int32(tokens)
        arrays["sample_slots"] = _int32(slots)
        arrays["sample_positions"] = _int32(positions)

    def _logit_edits(self, plan: StepPlan, slots: np.ndarray, arrays: Arrays) -> None:
        """(row, token, value to add) for bias, bad words and stop tokens before min_tokens."""
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, slot in enumerate(slots.tolist()):
            memory = self._memory.get(slot)
            if memory is None:
                continue
            edits = list(zip(memory.bias_tokens, memory.bias_values, strict=True))
            edits += [(token, NEVER) for token in _forbidden_now(memory.seq)]
            for token, value in edits:
                rows.append(row)
                tokens.append(token)
                values.append(value)
        arrays["edit_rows"] = np.array(rows, np.int64)
        arrays["edit_tokens"] = np.array(tokens, np.int64)
        arrays["edit_values"] = np.array(values, np.float32)


def _forbidden_now(seq: Sequence) -> list[int]:
    """Tokens that must not come next: stop tokens before min_tokens, ends of bad words.

    Called right after the plan, so the token to be sampled is already counted as in flight.
    """
    request = seq.request
    num_before = seq.num_tokens - 1 - seq.num_prompt_tokens
    forbidden: list[int] = []
    if num_before < request.sampling_params.min_tokens:
        forbidden += request.stop_token_ids
    outputs = seq.token_ids[seq.num_prompt_tokens :]
    for word in request.bad_words_ids:
        start = len(word) - 1
        # Only sequences whose tokens are all known carry longer words: needs_known_tokens.
        if start > 0 and tuple(outputs[-start:]) == word[:-1]:
            forbidden.append(word[-1])
    return forbidden


def _block_table_entries(plan: StepPlan, arrays: Arrays) -> None:
    inits, appends = plan.slot_inits, plan.page_appends
    if not inits and not appends:
        return
    slots = [init.slot for init in inits for _ in init.block_ids] + [a.slot for a in appends]
    indices = [i for init in inits for i in range(len(init.block_ids))]
    pages = [page for init in inits for page in init.block_ids]
    arrays["table_slots"] = _int32(slots)
    arrays["table_indices"] = _int32(indices + [a.block_index for a in appends])
    arrays["table_pages"] = _int32(pages + [a.block_id for a in appends])


def _penalty_entries(inits: list[SlotInit], arrays: Arrays) -> None:
    arrays["penalty_slots"] = _int32([init.slot for init in inits])
    prompts = [init.token_ids[: init.seq.num_prompt_tokens] for init in inits]
    outputs = [init.token_ids[init.seq.num_prompt_tokens :] for init in inits]
    for name, lists in (("prompt", prompts), ("output", outputs)):
        arrays[f"{name}_slots"] = _int32(
            [init.slot for init, ids in zip(inits, lists, strict=True) for _ in ids]
        )
        arrays[f"{name}_tokens"] = _int32([token for ids in lists for token in ids])


def _allowed_entries(inits: list[SlotInit], arrays: Arrays) -> None:
    lists = [init.seq.request.sampling_params.allowed_token_ids or [] for init in inits]
    arrays["allowed_slots"] = _int32([init.slot for init in inits])
    arrays["allowed_row_slots"] = _int32(
        [init.slot for init, ids in zip(inits, lists, strict=True) for _ in ids]
    )
    arrays["allowed_tokens"] = _int32([token for ids in lists for token in ids])


def _prompt_logprobs(plan: StepPlan, arrays: Arrays) -> tuple[PromptLogprobs, ...]:
    wanted: list[PromptLogprobs] = []
    first = len(plan.decodes)
    for row in plan.prefills:
        num_top = row.seq.request.sampling_params.prompt_logprobs
        if num_top is not None:
            prompt = row.seq.request.prompt_token_ids
            targets = prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]
            if targets:
                entry = PromptLogprobs(row.seq.seq_id, first, len(targets), num_top)
                arrays[entry.array_name] = _int32(targets)
                wanted.append(entry)
        first += len(row.token_ids)
    return tuple(wanted)


def _zip(rows: tuple[PrefillRow, ...], lens: np.ndarray) -> zip[tuple[PrefillRow, int]]:
    return zip(rows, lens.tolist(), strict=True)


def _int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _indptr(lens: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: 0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lens, dtype=np.int32)])
