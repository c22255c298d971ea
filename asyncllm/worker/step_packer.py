"""Packs a `StepPlan` into a `PackedStep`, on the host.

A step with the same decodes as the last one, and no new pages, builds no arrays. `WriteSlots`
applies slot changes. `DeviceState.apply` takes some of the extras; sampling and logprobs read the
others.
"""

from __future__ import annotations

import numpy as np

from asyncllm.attention.base import PrefillRows
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import DecodeBatch, StepPlan
from asyncllm.worker.packed_step import (
    NO_EXTRAS,
    NO_FEATURE,
    NO_PROMPTS,
    NO_ROWS,
    Feature,
    LogitEdits,
    PackedStep,
    PromptLogprobsRow,
)
from asyncllm.worker.slot_changes import pack_changes
from asyncllm.worker.slot_sampling import SlotSampling, int32


class StepPacker:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._block_size = block_size
        self._sampling = SlotSampling(num_slots)
        self._decode_slots, self._decode_features = NO_ROWS, NO_FEATURE  # of the last decode step

    def pack(self, plan: StepPlan) -> PackedStep:
        extras = NO_EXTRAS
        if plan.slot_inits:
            extras = self._sampling.init(plan.slot_inits)
        sampled_slots = plan.decodes.slots
        tokens = samples = NO_ROWS
        prefills, num_top = NO_PROMPTS, None
        prompt_logprobs: tuple[PromptLogprobsRow, ...] = ()
        if plan.prefills:
            tokens, samples, prefills = self._tokens(plan)
            sampled_slots = samples[1]
            features = self._sampling.features(sampled_slots)
            prompt_logprobs, prompt_targets = _prompt_logprobs(plan)
            if prompt_targets is not None:
                extras = extras._replace(prompt_targets=prompt_targets)
        else:
            features = self._features_of_decodes(sampled_slots)
        if features & Feature.EDIT and not plan.needs_host:
            extras = extras._replace(edits=self._sampling.logit_edits(sampled_slots))
        if features & Feature.LOGPROBS:
            num_top, logprob_ids = _logprobs(plan)
            extras = extras._replace(logprob_ids=logprob_ids)
        return PackedStep(
            decode_slots=plan.decodes.slots,
            decode_positions=plan.decodes.positions,
            sampled_slots=sampled_slots,
            tokens=tokens,
            samples=samples,
            prefills=prefills,
            swap_out=plan.swap_out,
            page_copies=plan.page_copies,
            swap_in=plan.swap_in,
            states=plan.states,
            changes=pack_changes(plan.slot_inits, plan.page_appends, self._num_slots),
            features=features,
            extras=extras,
            num_top_logprobs=num_top,
            prompt_logprobs=prompt_logprobs,
            needs_host=plan.needs_host,
            adapters=plan.adapters,
        )

    def pack_edits(self, step: PackedStep) -> LogitEdits[np.ndarray] | None:
        """The edits of a step that `needs_host`, when all tokens before it are known."""
        if not step.features & Feature.EDIT:
            return None
        return self._sampling.logit_edits(step.sampled_slots)

    def _features_of_decodes(self, slots: np.ndarray) -> int:
        """Cached while the same sequences decode, as their array of slots is the same object."""
        if slots is not self._decode_slots:
            self._decode_slots, self._decode_features = slots, self._sampling.features(slots)
        return self._decode_features

    def _tokens(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, PrefillRows]:
        """`tokens`, `samples` and `prefills` of a `PackedStep`. Lists come first, then few arrays:
        up to a hundred tokens a numpy call costs more than its work."""
        num_decodes = len(plan.decodes.slots)
        token_ids: list[int] = []
        pages: list[list[int]] = [[] for _ in plan.prefills[0].block_ids]
        # Columns per row: end of its tokens and of its pages; kv_len; number of tokens; position
        # minus token index; slot; first page. The first entry has the starts.
        of_rows = [(0,) * 7]
        samples: list[tuple[int, int, int]] = []
        for row in plan.prefills:
            first, first_page, start = len(token_ids), len(pages[0]), row.start
            token_ids += row.token_ids
            for of_group, block_ids in zip(pages, row.block_ids, strict=True):
                of_group += block_ids
            end = len(token_ids)
            kv_len = start + end - first
            of_rows.append(
                (end, len(pages[0]), kv_len, end - first, start - first, row.slot, first_page)
            )
            if row.samples:
                samples += [(num_decodes + end - 1, seq.slot, kv_len) for seq in row.samples]
        columns = np.array([*zip(*of_rows, strict=True)], np.int32)
        saves = [
            (i, of_rows[i][0] + place, state_row)
            for i, row in enumerate(plan.prefills)
            for place, state_row in row.saves
        ]
        prefills = PrefillRows(
            columns[0],
            columns[2, 1:],
            columns[1],
            np.array(pages, np.int32),
            columns[5, 1:],
            np.array(saves, np.int32).reshape(-1, 3),
        )
        tokens = columns[3:, 1:].repeat(columns[3, 1:], axis=1)
        tokens[0] = np.fromiter(token_ids, np.int32, len(token_ids))
        positions, first_pages = tokens[1], tokens[3]
        positions += np.arange(len(token_ids), dtype=np.int32)
        blocks, offsets = np.divmod(positions, self._block_size)
        blocks += first_pages
        write_slots = prefills.pages.take(blocks, axis=1)  # [groups, P]
        write_slots *= self._block_size
        write_slots += offsets
        tokens = np.concatenate((tokens[:3], write_slots))
        return tokens, _samples(plan.decodes, samples), prefills


def _samples(decodes: DecodeBatch, of_prefills: list[tuple[int, int, int]]) -> np.ndarray:
    """`PackedStep.samples`, int32 [3, R]."""
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


def _logprobs(plan: StepPlan) -> tuple[int, np.ndarray | None]:
    """The number of most likely tokens to look up for all rows; and `logprob_token_ids` of each
    row, int32 [rows, ids], padded with 0, if any row has some."""
    wanted: list[SamplingParams] = [seq.request.sampling_params for seq in plan.sampled]
    num_top = max(0 if params.logprob_token_ids else params.logprobs or 0 for params in wanted)
    width = max(len(params.logprob_token_ids or ()) for params in wanted)
    if not width:
        return num_top, None
    ids = np.zeros((len(wanted), width), np.int32)
    for row, params in enumerate(wanted):
        named = params.logprob_token_ids or ()
        ids[row, : len(named)] = named
    return num_top, ids


def _prompt_logprobs(plan: StepPlan) -> tuple[tuple[PromptLogprobsRow, ...], np.ndarray | None]:
    """Rows with prompt logprobs, and all their targets."""
    wanted: list[PromptLogprobsRow] = []
    targets: list[int] = []
    first = len(plan.decodes)
    for row in plan.prefills:
        num_top = row.seq.request.sampling_params.prompt_logprobs
        if num_top is not None and row.seq.owes_prompt_logprobs:
            prompt = row.seq.request.prompt_token_ids
            of_row = prompt[row.start + 1 : row.start + 1 + len(row.token_ids)]
            if of_row:
                wanted.append(PromptLogprobsRow(row.seq.seq_id, first, len(of_row), num_top))
                targets += of_row
        first += len(row.token_ids)
    return tuple(wanted), int32(targets) if targets else None
