"""Samples a step's tokens from its logits, computes log-probabilities, and copies both to the host.

If no row needs more, rows are sampled plainly, unless the graph of the forward pass has done so.
Otherwise all rows of the step are sampled in full, which overwrites what a graph has sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from asyncllm.graphs.pool import Recorded
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult, TokenLogprobs
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import Collect
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.packed_step import (
    NO_ROWS,
    PLAIN,
    DeviceExtras,
    Feature,
    LogitEdits,
    PackedStep,
    PromptLogprobsRow,
)
from asyncllm.worker.sampler import LogprobTensors, SampleSlots, gather_logprobs, sample_fully
from asyncllm.worker.staging import ResultBuffers, Staging
from asyncllm.worker.token_masks import TokenMaskBuffer

HostEdits = LogitEdits[np.ndarray]
PROMPT_LOGPROB_ROWS = 128  # rows of logits at a time, for prompt logprobs


class Forwarded(NamedTuple):
    """The outputs of a forward pass, on the device. Rows after the step's are padding."""

    logits: torch.Tensor  # [rows, V]
    slots: torch.Tensor  # int32 [rows]
    positions: torch.Tensor | None  # int32 [rows], of the new tokens; None: those of the slots
    tokens: torch.Tensor | None  # int32 [rows], sampled plainly already; the slots are updated
    extras: DeviceExtras
    prompt_logprobs: SequenceOf[LogprobTensors]  # pieces of all rows with prompt logprobs, in order
    # Samples all rows with uploaded masks; None: not captured.
    resample: Recorded | None = None

    def first(self, num_rows: int) -> Forwarded:
        """The step's rows, without padding."""
        return self._replace(
            logits=self.logits[:num_rows],
            slots=self.slots[:num_rows],
            positions=None if self.positions is None else self.positions[:num_rows],
            tokens=None if self.tokens is None else self.tokens[:num_rows],
        )


@dataclass(frozen=True, eq=False)
class StepSampling:
    """Works on the current stream, without waiting for it."""

    state: DeviceState
    sample_slots: SampleSlots
    processors: LogitsProcessors
    masks: TokenMaskBuffer
    staging: Staging
    results: ResultBuffers
    mesh: Mesh

    def run(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded | None,
        edits: HostEdits | None = None,
        masked_rows: np.ndarray = NO_ROWS,
    ) -> Collect:
        """Enqueue sampling and copies. Returns the function that reads the result.

        forwarded: None if the step only moves pages. edits, masked_rows: of a step that
        `needs_host`; its masks are in their buffer.
        """
        if forwarded is None:
            return lambda: StepResult([])
        tokens, is_masked = forwarded.tokens, len(masked_rows) > 0
        failures: dict[int, BaseException] = {}
        if is_masked and forwarded.resample is not None and step.features == Feature.MASK:
            self.masks.upload(masked_rows, len(forwarded.logits))
            (tokens,) = forwarded.resample.replay()
        # In most steps the graph has sampled all tokens already.
        elif tokens is None or step.features or is_masked:
            forwarded = forwarded.first(len(step.sampled_slots))
            tokens = self._sample(step, plan, forwarded, edits, masked_rows, failures)
            if self.mesh.config.tp > 1 and tokens is not forwarded.tokens:
                self.mesh.broadcast(tokens)
        return self._fetch(step, plan, forwarded, tokens, failures)

    def follow(self, step: PackedStep, forwarded: Forwarded | None, is_masked: bool) -> Collect:
        """As `run`, on a rank that takes the tokens from rank 0. is_masked: whether rank 0 sampled
        with masks."""
        if forwarded is None:
            return lambda: StepResult([])
        if is_masked and forwarded.resample is not None and step.features == Feature.MASK:
            forwarded.resample.replay()
        elif forwarded.tokens is None or step.features & ~PLAIN or is_masked:
            rows = forwarded.first(len(step.sampled_slots))
            self.sample_slots(self.state, rows.logits, rows.slots, rows.positions, None)
        return lambda: StepResult([])

    def _sample(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded,
        edits: HostEdits | None,
        masked_rows: np.ndarray,
        failures: dict[int, BaseException],
    ) -> torch.Tensor:
        """Sampled tokens, int32 [rows]. Adds errors of logits processors, by row, to `failures`."""
        rows, row_masks = (forwarded.logits, forwarded.slots, forwarded.positions), None
        if len(masked_rows):
            row_masks = self.masks.upload(masked_rows, len(forwarded.logits))
        if not (step.features and step.features & ~PLAIN):
            if forwarded.tokens is not None and row_masks is None:
                return forwarded.tokens
            return self.sample_slots(self.state, *rows, row_masks)
        on_device = forwarded.extras.edits if edits is None else self.staging.upload(edits)

        def process(logits: torch.Tensor) -> None:
            if step.features & Feature.PROCESS:
                failures.update(self.processors.apply(logits, plan.sampled))

        return sample_fully(
            self.sample_slots, self.state, *rows, step.features, on_device, row_masks, process
        )

    def _fetch(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded,
        tokens: torch.Tensor,
        failures: dict[int, BaseException],
    ) -> Collect:
        """Enqueue copies to pinned memory. Returns the function that reads them after the step's
        end.

        tokens: int32 [rows or more]. failures: errors of logits processors, by row.
        """
        token_ids = self.results.fetch(tokens, len(step.sampled_slots))
        logprobs = None
        if step.num_top_logprobs is not None:
            tensors = gather_logprobs(
                forwarded.logits, tokens, step.num_top_logprobs, forwarded.extras.logprob_ids
            )
            logprobs = _logprobs_to_host(tensors)
        prompt = [_logprobs_to_host(tensors) for tensors in forwarded.prompt_logprobs]

        def collect() -> StepResult:
            params = [seq.request.sampling_params for seq in plan.sampled] if logprobs else []
            return StepResult(
                token_ids(),
                _sample_logprobs(params, logprobs) if logprobs is not None else None,
                _split_prompt_logprobs(step.prompt_logprobs, prompt),
                failures,
            )

        return collect


def prompt_logprobs(
    wanted: SequenceOf[PromptLogprobsRow],
    extras: DeviceExtras,
    logits_of: Callable[[int, int], torch.Tensor],
) -> list[LogprobTensors]:
    """Prompt logprobs, in pieces, as the logits of a whole prompt would need too much memory.

    logits_of: (index of the first token, number of tokens) -> logits [tokens, V].
    """
    pieces: list[LogprobTensors] = []
    if not wanted:
        return pieces
    assert extras.prompt_targets is not None
    targets = extras.prompt_targets.split([row.num_targets for row in wanted])
    for row, of_row in zip(wanted, targets, strict=True):
        for start in range(0, row.num_targets, PROMPT_LOGPROB_ROWS):
            piece = of_row[start : start + PROMPT_LOGPROB_ROWS]
            first = row.first_token + start
            logits = logits_of(first, len(piece))
            pieces.append(gather_logprobs(logits, piece, row.num_top))
    return pieces


def _logprobs_to_host(tensors: LogprobTensors) -> LogprobTensors:
    return LogprobTensors._make(None if each is None else _to_host(each) for each in tensors)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _token_logprobs(tensors: LogprobTensors) -> list[TokenLogprobs]:
    columns = tensors.logprobs, tensors.ranks, tensors.top_ids, tensors.top_logprobs
    entries = zip(*(column.tolist() for column in columns), strict=True)
    return [TokenLogprobs(*entry) for entry in entries]


def _sample_logprobs(
    wanted: SequenceOf[SamplingParams], tensors: LogprobTensors
) -> list[TokenLogprobs | None]:
    """Each row's logprobs: of the most likely tokens, or of `logprob_token_ids`. None if the row's
    request did not ask."""
    entries = _token_logprobs(tensors)
    named = None if tensors.named_logprobs is None else tensors.named_logprobs.tolist()
    result: list[TokenLogprobs | None] = []
    for row, (entry, params) in enumerate(zip(entries, wanted, strict=True)):
        num_others = params.num_logprobs
        if num_others is None:
            result.append(None)
            continue
        others: tuple[SequenceOf[int], SequenceOf[float]] = entry.top_ids, entry.top_logprobs
        if params.logprob_token_ids:
            assert named is not None, "the logprobs of logprob_token_ids were not computed"
            others = params.logprob_token_ids, named[row]
        ids, logprobs = others
        result.append(
            TokenLogprobs(entry.logprob, entry.rank, ids[:num_others], logprobs[:num_others])
        )
    return result


def _split_prompt_logprobs(
    rows: SequenceOf[PromptLogprobsRow], pieces: list[LogprobTensors]
) -> dict[int, list[TokenLogprobs]]:
    """Prompt logprobs by seq_id, from the pieces of all rows in order."""
    entries = iter([entry for piece in pieces for entry in _token_logprobs(piece)])
    return {row.seq_id: [next(entries) for _ in range(row.num_targets)] for row in rows}
