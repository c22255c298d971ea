"""From a step's logits to tokens and log-probabilities, and their copy to the host.

Rows that ask for nothing special are sampled plainly, if the forward pass has not done so in its
graph; else all rows of the step are sampled in full, and what a graph sampled is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.step_plan import StepPlan
from asyncllm.types import NO_MASKS, StepResult, TokenMasks
from asyncllm.worker.executor import Collect
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.packed_step import PLAIN, Feature, LogitEdits, PackedStep
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_results import Forwarded, ResultBuffers, fetch
from asyncllm.worker.token_masks import TokenMaskBuffer

HostEdits = LogitEdits[np.ndarray]


@dataclass(frozen=True, eq=False)
class StepSampling:
    """On the current stream, without waiting for it."""

    sampler: Sampler
    processors: LogitsProcessors
    masks: TokenMaskBuffer
    staging: Staging
    results: ResultBuffers

    def run(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded | None,
        edits: HostEdits | None = None,
        masks: TokenMasks = NO_MASKS,
    ) -> Collect:
        """forwarded: None for swaps alone. edits, masks: those of a step that `needs_host`, which
        come when its forward pass is launched."""
        if forwarded is None:
            return lambda: StepResult([])
        tokens, is_masked = forwarded.tokens, len(masks.rows) > 0
        failures: dict[int, Exception] = {}
        if is_masked and forwarded.resample is not None and step.features == Feature.MASK:
            self.masks.upload(masks.rows, len(forwarded.logits))
            (tokens,) = forwarded.resample.replay()
        # Of most steps nothing is wanted but tokens that are sampled already.
        elif tokens is None or step.features or is_masked:
            forwarded = forwarded.first(len(step.sampled_slots))
            tokens, failures = self._sample(step, plan, forwarded, edits, masks)
        return fetch(step, plan, forwarded, tokens, failures, self.results)

    def _sample(
        self,
        step: PackedStep,
        plan: StepPlan,
        forwarded: Forwarded,
        edits: HostEdits | None,
        masks: TokenMasks,
    ) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Tokens int32 [rows], and what processors raised, by row."""
        rows, row_masks = (forwarded.logits, forwarded.slots, forwarded.positions), None
        if len(masks.rows):
            row_masks = self.masks.upload(masks.rows, len(forwarded.logits))
        if not (step.features and step.features & ~PLAIN):
            if forwarded.tokens is not None and row_masks is None:
                return forwarded.tokens, {}
            return self.sampler.plain(*rows, row_masks), {}
        on_device = forwarded.extras.edits if edits is None else self.staging.upload(edits)
        failures: dict[int, Exception] = {}

        def process(logits: torch.Tensor) -> None:
            failures.update(self.processors.apply(logits, plan.sampled))

        is_processed = step.features & Feature.PROCESS
        tokens = self.sampler.full(
            *rows, step.features, on_device, row_masks, process if is_processed else None
        )
        return tokens, failures
