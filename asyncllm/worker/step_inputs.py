"""A `StepPlan` as arrays: everything that the device must be told for one step, packed on the host.

A step of the same decodes as the one before, with no new page, builds nothing. `slot_inits` and
`table_entries` are what a `WriteSlots` writes, others are for `DeviceState.apply`; forward pass and
sampler read the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncllm.attention.base import PrefillRows
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import PrefillRow, StepPlan
from asyncllm.types import PADDING_PAGE, PADDING_SLOT
from asyncllm.worker.slot_changes import pack_entries, pack_inits
from asyncllm.worker.slot_sampling import Arrays, Feature, SlotSampling, int32


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
class StepTokens:
    """The tokens of a step with prefills, D decodes and P tokens of prompts, and its R samples."""

    decode_slots: np.ndarray  # int32 [D]
    max_decode_len: int  # the longest context of a decode
    token_ids: np.ndarray  # int32 [P]
    positions: np.ndarray  # int32 [P]
    prompt_lens: np.ndarray  # int32 [P]: of each token's sequence
    write_slots: np.ndarray  # int64 [P]: flat KV positions
    sample_tokens: np.ndarray  # int32 [R]: which of the D + P tokens are sampled from
    sample_slots: np.ndarray  # int32 [R]
    sample_positions: np.ndarray  # int32 [R]: of the new tokens
    prefills: PrefillRows

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepInputs:
    plan: StepPlan
    arrays: Arrays
    decode_slots: np.ndarray  # int32 [decodes]
    sampled_slots: np.ndarray  # int32 [rows that sample]
    max_decode_len: int
    tokens: StepTokens | None  # of a step with prefills
    features: Feature
    wants_logprobs: tuple[SamplingParams, ...]  # of the sampled rows; empty: no row wants any
    prompt_logprobs: tuple[PromptLogprobs, ...]


class StepBuilder:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._sampling = SlotSampling(num_slots)
        self._decode_slots, self._decode_features = int32([]), Feature(0)  # of the last step

    def build(self, plan: StepPlan) -> StepInputs:
        arrays: Arrays = {}
        if plan.slot_inits:
            arrays["slot_inits"] = pack_inits(plan.slot_inits)
            self._sampling.init(plan.slot_inits, arrays)
        if plan.slot_inits or plan.page_appends:
            arrays["table_entries"] = pack_entries(plan.slot_inits, plan.page_appends)
        slots, features = plan.decodes.slots, self._features_of_decodes(plan)
        max_decode_len = int(plan.decodes.positions.max()) + 1 if len(slots) else 0
        tokens, sampled_slots = None, slots
        if plan.prefills:
            tokens = self._tokens(plan, max_decode_len)
            sampled_slots = tokens.sample_slots
            features = self._sampling.features(sampled_slots)
        if features & Feature.EDIT and not plan.needs_host:
            self._sampling.add_logit_edits(sampled_slots, arrays)
        wants: tuple[SamplingParams, ...] = ()
        if features & Feature.LOGPROBS:
            wants = tuple(seq.request.sampling_params for seq in plan.sampled)
            _logprob_ids(wants, arrays)
        return StepInputs(
            plan=plan,
            arrays=arrays,
            decode_slots=slots,
            sampled_slots=sampled_slots,
            max_decode_len=max_decode_len,
            tokens=tokens,
            features=features,
            wants_logprobs=wants,
            prompt_logprobs=_prompt_logprobs(plan, arrays) if plan.prefills else (),
        )

    def build_sampling(self, inputs: StepInputs) -> Arrays:
        """What a step that `needs_host` is told later, all tokens before its own being known."""
        arrays: Arrays = {}
        if inputs.features & Feature.EDIT:
            self._sampling.add_logit_edits(inputs.sampled_slots, arrays)
        return arrays

    def _features_of_decodes(self, plan: StepPlan) -> Feature:
        """Known already where the same sequences decode: their array of slots is the same too."""
        slots = plan.decodes.slots
        if slots is not self._decode_slots:
            self._decode_slots, self._decode_features = slots, self._sampling.features(slots)
        return self._decode_features

    def _tokens(self, plan: StepPlan, max_decode_len: int) -> StepTokens:
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
        kv_lens = np.array([row.start for row in rows], np.int32) + lens
        sample_tokens, sample_slots, sample_positions = _samples(plan, indptr, kv_lens)
        return StepTokens(
            decode_slots=plan.decodes.slots,
            max_decode_len=max_decode_len,
            token_ids=np.concatenate([np.array(row.token_ids, np.int32) for row in rows]),
            positions=positions,
            prompt_lens=int32([r.seq.num_prompt_tokens for r in rows]).repeat(lens),
            write_slots=write_slots + positions % self._block_size,
            sample_tokens=sample_tokens,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            prefills=PrefillRows(indptr, kv_lens, page_indptr, pages),
        )


def _samples(
    plan: StepPlan, indptr: np.ndarray, kv_lens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32 [R] each: which tokens are sampled from, for which slots, at which positions."""
    num_decodes = len(plan.decodes)
    last = [
        (num_decodes + int(indptr[i + 1]) - 1, seq.slot, int(kv_lens[i]))
        for i, row in enumerate(plan.prefills)
        for seq in row.samples
    ]
    tokens, slots, positions = np.array(last, np.int32).reshape(-1, 3).T
    return (
        np.concatenate([np.arange(num_decodes, dtype=np.int32), tokens]),
        np.concatenate([plan.decodes.slots, slots]),
        np.concatenate([plan.decodes.positions + 1, positions], dtype=np.int32),
    )


def _logprob_ids(wants: tuple[SamplingParams, ...], arrays: Arrays) -> None:
    """int32 [rows, ids]: the tokens that each row named, filled up with 0; only if one did."""
    width = max(len(params.logprob_token_ids or ()) for params in wants)
    if width:
        ids = np.zeros((len(wants), width), np.int32)
        for row, params in enumerate(wants):
            named = params.logprob_token_ids or ()
            ids[row, : len(named)] = named
        arrays["logprob_ids"] = ids


def _prompt_logprobs(plan: StepPlan, arrays: Arrays) -> tuple[PromptLogprobs, ...]:
    wanted: list[PromptLogprobs] = []
    first = len(plan.decodes)
    for row in plan.prefills:
        num_top = row.seq.request.sampling_params.prompt_logprobs
        if num_top is not None and row.seq.owes_prompt_logprobs:
            prompt = row.seq.request.prompt_token_ids
            targets = prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]
            if targets:
                entry = PromptLogprobs(row.seq.seq_id, first, len(targets), num_top)
                arrays[entry.array_name] = int32(targets)
                wanted.append(entry)
        first += len(row.token_ids)
    return tuple(wanted)


def _zip(rows: tuple[PrefillRow, ...], lens: np.ndarray) -> zip[tuple[PrefillRow, int]]:
    return zip(rows, lens.tolist(), strict=True)


def _indptr(lens: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: 0 and the running sums."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lens, dtype=np.int32)])


def padding_prompt(num_tokens: int, block_size: int) -> StepTokens:
    """A step of one prompt, and its first token, on the padding page and slot."""
    num_pages = -(-num_tokens // block_size)
    zeros = np.zeros(num_tokens, np.int32)
    return StepTokens(
        decode_slots=zeros[:0],
        max_decode_len=0,
        token_ids=zeros,
        positions=np.arange(num_tokens, dtype=np.int32),
        prompt_lens=zeros + num_tokens,
        write_slots=zeros.astype(np.int64),
        sample_tokens=np.array([num_tokens - 1], np.int32),
        sample_slots=np.array([PADDING_SLOT], np.int32),
        sample_positions=zeros[:1],
        prefills=PrefillRows(
            query_indptr=np.array([0, num_tokens], np.int32),
            kv_lens=np.array([num_tokens], np.int32),
            page_indptr=np.array([0, num_pages], np.int32),
            pages=np.full(num_pages, PADDING_PAGE, np.int32),
        ),
    )
