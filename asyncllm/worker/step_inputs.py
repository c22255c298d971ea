"""A `StepPlan` as arrays: everything that the device must be told for one step, packed on the host.

A step of the same decodes as the one before, with no new page, builds nothing. Changes are for a
`WriteSlots`; of the arrays some are for `DeviceState.apply`, sampler and logprobs read the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncllm.attention.base import PrefillRows
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import DecodeBatch, StepPlan
from asyncllm.types import PADDING_PAGE, PADDING_SLOT
from asyncllm.worker.slot_changes import SlotChanges, pack_changes
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
    decode_positions: np.ndarray  # int32 [D]
    tokens: np.ndarray  # int32 [3, P]: positions, lengths of their prompts, ids
    write_slots: np.ndarray  # int32 [P]: flat KV positions
    samples: np.ndarray  # int32 [3, R]: which of the D + P tokens; slots; new tokens' positions
    prefills: PrefillRows

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + len(self.write_slots)

    @property
    def num_samples(self) -> int:
        return self.samples.shape[1]


@dataclass(frozen=True, slots=True)
class StepInputs:
    plan: StepPlan
    changes: SlotChanges
    arrays: Arrays
    decode_slots: np.ndarray  # int32 [decodes]
    sampled_slots: np.ndarray  # int32 [rows that sample]
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
            self._sampling.init(plan.slot_inits, arrays)
        tokens = None
        if plan.prefills:
            tokens = self._tokens(plan)
            sampled_slots = tokens.samples[1]
            features = self._sampling.features(sampled_slots)
        else:
            sampled_slots = plan.decodes.slots
            features = self._features_of_decodes(sampled_slots)
        if features and features & Feature.EDIT and not plan.needs_host:
            self._sampling.add_logit_edits(sampled_slots, arrays)
        wants: tuple[SamplingParams, ...] = ()
        if features and features & Feature.LOGPROBS:
            wants = tuple(seq.request.sampling_params for seq in plan.sampled)
            _logprob_ids(wants, arrays)
        return StepInputs(
            plan=plan,
            changes=pack_changes(plan.slot_inits, plan.page_appends),
            arrays=arrays,
            decode_slots=plan.decodes.slots,
            sampled_slots=sampled_slots,
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

    def _features_of_decodes(self, slots: np.ndarray) -> Feature:
        """Known already where the same sequences decode: their array of slots is the same too."""
        if slots is not self._decode_slots:
            self._decode_slots, self._decode_features = slots, self._sampling.features(slots)
        return self._decode_features

    def _tokens(self, plan: StepPlan) -> StepTokens:
        """Lists first, then few arrays: to a hundred tokens a call of numpy costs more than its
        work."""
        decodes, num_decodes = plan.decodes, len(plan.decodes.slots)
        token_ids: list[int] = []
        pages: list[int] = []
        # Ends of tokens and pages; kv_len, tokens; what their positions are behind their places in
        # the step, their prompt's length, their row's first page. Before all rows: beginnings.
        of_rows = [(0,) * 7]
        samples: list[tuple[int, int, int]] = []
        for row in plan.prefills:
            first, first_page, start = len(token_ids), len(pages), row.start
            token_ids += row.token_ids
            pages += row.block_ids
            end = len(token_ids)
            kv_len, prompt_len = start + end - first, len(row.seq.request.prompt_token_ids)
            of_rows.append(
                (end, len(pages), kv_len, end - first, start - first, prompt_len, first_page)
            )
            if row.samples:
                samples += [(num_decodes + end - 1, seq.slot, kv_len) for seq in row.samples]
        columns = np.array([*zip(*of_rows, strict=True)], np.int32)
        prefills = PrefillRows(columns[0], columns[2, 1:], columns[1], int32(pages))
        tokens = columns[4:, 1:].repeat(columns[3, 1:], axis=1)
        positions = tokens[0]
        positions += np.arange(len(token_ids), dtype=np.int32)
        blocks, offsets = np.divmod(positions, self._block_size)
        blocks += tokens[2]
        write_slots = prefills.pages.take(blocks)
        write_slots *= self._block_size
        write_slots += offsets
        tokens[2] = np.fromiter(token_ids, np.int32, len(token_ids))
        return StepTokens(
            decode_slots=decodes.slots,
            decode_positions=decodes.positions,
            tokens=tokens,
            write_slots=write_slots,
            samples=_samples(decodes, samples),
            prefills=prefills,
        )


def _samples(decodes: DecodeBatch, of_prefills: list[tuple[int, int, int]]) -> np.ndarray:
    """int32 [3, R], as `StepTokens` has them."""
    last = np.array(of_prefills, np.int32).reshape(-1, 3).T
    num_decodes = len(decodes.slots)
    if not num_decodes:
        return last
    samples = np.empty((3, num_decodes + len(of_prefills)), np.int32)
    samples[0, :num_decodes] = np.arange(num_decodes)
    samples[1, :num_decodes] = decodes.slots
    samples[2, :num_decodes] = decodes.positions + 1
    samples[:, num_decodes:] = last
    return samples


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


def padding_prompt(num_tokens: int, block_size: int) -> StepTokens:
    """A step of one prompt, and its first token, on the padding page and slot."""
    num_pages = -(-num_tokens // block_size)
    zeros = np.zeros(num_tokens, np.int32)
    return StepTokens(
        decode_slots=zeros[:0],
        decode_positions=zeros[:0],
        tokens=np.stack((np.arange(num_tokens, dtype=np.int32), zeros + num_tokens, zeros)),
        write_slots=zeros,
        samples=np.array([[num_tokens - 1], [PADDING_SLOT], [0]], np.int32),
        prefills=PrefillRows(
            query_indptr=np.array([0, num_tokens], np.int32),
            kv_lens=np.array([num_tokens], np.int32),
            page_indptr=np.array([0, num_pages], np.int32),
            pages=np.full(num_pages, PADDING_PAGE, np.int32),
        ),
    )
