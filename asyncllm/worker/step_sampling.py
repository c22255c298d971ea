"""From a step's logits to tokens and log-probabilities, and their copy to the host.

Rows that ask for nothing special are sampled plainly, if the forward pass has not done so in its
graph; else all rows of the step are sampled in full, and what a graph sampled is overwritten.
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
    PromptLogprobs,
)
from asyncllm.worker.sampler import LogprobTensors, SampleSlots, gather_logprobs, sample_fully
from asyncllm.worker.staging import ResultBuffers, Staging
from asyncllm.worker.token_masks import TokenMaskBuffer

HostEdits = LogitEdits[np.ndarray]
PROMPT_LOGPROB_ROWS = 128  # rows of logits at once, for prompt logprobs


class Forwarded(NamedTuple):
    """The outputs of the forward pass that sampling reads, on the device. More rows than the step's
    are padding, behind them."""

    logits: torch.Tensor  # [rows, V], raw
    slots: torch.Tensor  # int32 [rows]
    positions: torch.Tensor | None  # int32 [rows], of the new tokens; None: as the slots say
    tokens: torch.Tensor | None  # int32 [rows], sampled plainly already, the slots advanced
    extras: DeviceExtras
    prompt_logprobs: SequenceOf[LogprobTensors]  # the pieces of all rows that want them, in order
    # Tokens of all rows, by masks that were uploaded for all; None where that is not captured.
    resample: Recorded | None = None

    def first(self, num_rows: int) -> Forwarded:
        """The step's rows alone."""
        return self._replace(
            logits=self.logits[:num_rows],
            slots=self.slots[:num_rows],
            positions=None if self.positions is None else self.positions[:num_rows],
            tokens=None if self.tokens is None else self.tokens[:num_rows],
        )


@dataclass(frozen=True, eq=False)
class StepSampling:
    """On the current stream, without waiting for it."""

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
        """forwarded: None for swaps alone. edits, masked_rows: those of a step that `needs_host`,
        which come when its forward pass is launched; the masks are in their buffer."""
        if forwarded is None:
            return lambda: StepResult([])
        tokens, is_masked = forwarded.tokens, len(masked_rows) > 0
        failures: dict[int, Exception] = {}
        if is_masked and forwarded.resample is not None and step.features == Feature.MASK:
            self.masks.upload(masked_rows, len(forwarded.logits))
            (tokens,) = forwarded.resample.replay()
        # Of most steps nothing is wanted but tokens that are sampled already.
        elif tokens is None or step.features or is_masked:
            forwarded = forwarded.first(len(step.sampled_slots))
            tokens = self._sample(step, plan, forwarded, edits, masked_rows, failures)
            if self.mesh.config.tp > 1 and tokens is not forwarded.tokens:
                self.mesh.broadcast(tokens)
        return self._fetch(step, plan, forwarded, tokens, failures)

    def follow(self, step: PackedStep, forwarded: Forwarded | None, is_masked: bool) -> Collect:
        """As `run`, on a rank that gets the tokens: its slots move on to them. is_masked: whether a
        step that `needs_host` was sampled by masks."""
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
        failures: dict[int, Exception],
    ) -> torch.Tensor:
        """Tokens int32 [rows]; `failures` gets what processors raise, by row."""
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
        failures: dict[int, Exception],
    ) -> Collect:
        """Enqueue the copies to pinned memory; what is returned reads them, after the step's end.

        tokens: int32 [rows or more]. failures: of logits processors, by row.
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
    wanted: SequenceOf[PromptLogprobs],
    extras: DeviceExtras,
    logits_of: Callable[[int, int], torch.Tensor],
) -> list[LogprobTensors]:
    """In pieces: logits of a whole prompt would not fit beside the KV cache.

    logits_of: (first token of the step, number of tokens) -> [tokens, V].
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
    """Per sampled row what its request asked for: the top few, or the tokens that it named."""
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
            assert named is not None, "a row named tokens, and none were looked up"
            others = params.logprob_token_ids, named[row]
        ids, logprobs = others
        result.append(
            TokenLogprobs(entry.logprob, entry.rank, ids[:num_others], logprobs[:num_others])
        )
    return result


def _split_prompt_logprobs(
    rows: SequenceOf[PromptLogprobs], pieces: list[LogprobTensors]
) -> dict[int, list[TokenLogprobs]]:
    """seq_id -> entries, from the pieces of all rows in order."""
    entries = iter([entry for piece in pieces for entry in _token_logprobs(piece)])
    return {row.seq_id: [next(entries) for _ in range(row.num_targets)] for row in rows}
