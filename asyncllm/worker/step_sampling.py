"""From a step's logits to tokens and log-probabilities, and their copy to the host.

Rows that ask for nothing special are sampled plainly, if the forward pass has not done so in its
graph; else all rows of the step are sampled in full, and what a graph sampled is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncllm.graphs.pool import Recorded
from asyncllm.step_plan import StepPlan
from asyncllm.types import NO_MASKS, StepResult, TokenMasks
from asyncllm.worker.executor import Collect
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.packed_step import PLAIN, DeviceExtras, Feature, LogitEdits, PackedStep
from asyncllm.worker.sampler import LogprobTensors, Sampler
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_results import ResultBuffers, Sampled, fetch
from asyncllm.worker.token_masks import RowMasks, TokenMaskBuffer


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The outputs of the forward pass that sampling reads, on the device. More rows than the step's
    are padding, behind them."""

    logits: torch.Tensor  # [rows, V], raw
    slots: torch.Tensor  # int32 [rows]
    positions: torch.Tensor | None  # int32 [rows], of the new tokens; None: as the slots say
    tokens: torch.Tensor | None  # int32 [rows], sampled plainly already, the slots advanced
    extras: DeviceExtras
    prompt_logprobs: list[LogprobTensors]
    # Tokens of all rows, by masks that were uploaded for all; None where that is not captured.
    resample: Recorded | None = None

    def first(self, num_rows: int) -> Forwarded:
        """The step's rows alone."""
        return replace(
            self,
            logits=self.logits[:num_rows],
            slots=self.slots[:num_rows],
            positions=None if self.positions is None else self.positions[:num_rows],
            tokens=None if self.tokens is None else self.tokens[:num_rows],
        )


class StepSampling:
    """On the current stream, without waiting for it."""

    def __init__(
        self,
        sampler: Sampler,
        processors: LogitsProcessors,
        masks: TokenMaskBuffer,
        staging: Staging,
        results: ResultBuffers,
    ) -> None:
        self._sampler = sampler
        self._processors = processors
        self._masks = masks
        self._staging = staging
        self._results = results

    def run(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded | None,
        edits: LogitEdits[np.ndarray] | None = None,
        masks: TokenMasks = NO_MASKS,
    ) -> Collect:
        """forwarded: None for swaps alone. edits, masks: those of a step that `needs_host`, which
        come when its forward pass is launched."""
        if forwarded is None:
            return lambda: StepResult([])
        if forwarded.resample is not None and step.features == Feature.MASK and len(masks.rows):
            self._masks.upload(masks.rows, len(forwarded.logits))
            (resampled,) = forwarded.resample.replay()
            sampled = Sampled(resampled, forwarded.logits, None, [], {})
            return fetch(step, plan, sampled, self._results)
        num_rows = len(step.sampled_slots)
        # Of most steps nothing is wanted but tokens that are sampled already.
        if step.features or len(masks.rows) or forwarded.tokens is None:
            forwarded = forwarded.first(num_rows)
        tokens = forwarded.tokens
        failures: dict[int, Exception] = {}
        row_masks = None
        if len(masks.rows):
            row_masks = self._masks.upload(masks.rows, num_rows)
        if step.features and step.features & ~PLAIN:
            tokens, failures = self._in_full(step, plan, forwarded, edits, row_masks)
        elif tokens is None or row_masks is not None:
            tokens = self._sampler.plain(
                forwarded.logits, forwarded.slots, forwarded.positions, row_masks
            )
        sampled = Sampled(
            tokens,
            forwarded.logits,
            forwarded.extras.logprob_ids,
            forwarded.prompt_logprobs,
            failures,
        )
        return fetch(step, plan, sampled, self._results)

    def _in_full(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded,
        edits: LogitEdits[np.ndarray] | None,
        masks: RowMasks | None,
    ) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Tokens int32 [rows], and what processors raised, by row."""
        on_device = forwarded.extras.edits if edits is None else self._staging.upload(edits)
        failures: dict[int, Exception] = {}

        def process(logits: torch.Tensor) -> None:
            failures.update(self._processors.apply(logits, plan.sampled))

        tokens = self._sampler.full(
            forwarded.logits,
            forwarded.slots,
            forwarded.positions,
            step.features,
            on_device,
            masks,
            process if step.features & Feature.PROCESS else None,
        )
        return tokens, failures
