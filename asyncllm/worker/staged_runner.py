"""Runs steps on a rank of a pipeline stage: all ranks begin a step, those of stage 0 end it.

    stage 0   begin A | begin B | end A | begin A' | end B | begin B' | end A' | ...
    stage 1           | begin A         | begin B          | begin A'          | ...

A and B are steps of disjoint rows (engine/scheduler.py), so steps that begin between the two parts
of another one do not touch its slots. The static inputs of a step are written again for its end.
Only stage 0 knows tokens; the other stages only advance the positions of their slots.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.models.parallel.stages import Stages
from asyncllm.step_plan import StepShape
from asyncllm.worker.model_runner import ModelRunner, Rest
from asyncllm.worker.packed_step import NO_CHANGES, PackedStep
from asyncllm.worker.step_sampling import Forwarded


class StagedRunner(ModelRunner):
    """`graphs` capture `stage_step`; `last_graphs`, with and without adapters, `last_step`."""

    in_parts = True

    def __init__(self, stages: Stages, *args: Any) -> None:
        super().__init__(*args)
        self._stages = stages
        self.last_graphs: dict[bool, SizedGraphs[Recorded]] = {
            False: SizedGraphs(),
            True: SizedGraphs(),
        }

    def run_padding(self, num_tokens: int) -> None:
        step = self.padding_prompt(num_tokens)
        forwarded = self._begin_mixed(step, self.mixed.graph_shape(step))()
        if forwarded is not None and forwarded.tokens is None:
            self.mixed.sample(forwarded.logits)

    def stage_step(
        self, slots: torch.Tensor, max_len: int | None = None, *, adapters: bool = False
    ) -> tuple[torch.Tensor]:
        """This stage's layers of `decode_step`: the residual [rows, hidden_size]. Capturable."""
        last_tokens, next_positions, rows, prompt_lens = self._gather(slots, max_len, adapters)
        residual = self._layers(slots, last_tokens, rows, prompt_lens)
        if not self._stages.is_first:
            self._state.advance(slots, last_tokens, next_positions)
        return (residual,)

    def last_step(
        self, slots: torch.Tensor, *, adapters: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The end of `decode_step`, from the last stage's residual. Capturable."""
        state = self._state
        if self.lora is not None:
            self.lora.select(state.adapters[slots] if adapters else None)
        logits = self._model.compute_logits(self._stages.model.last_norm(len(slots)))
        next_positions = state.positions[slots] + 1
        return self._kernels.sample_slots(state, logits, slots, next_positions, None), logits

    def capture_last(self, size: int, pool: GraphPool, *, adapters: bool) -> torch.Tensor | None:
        """Capture `last_step`. Returns the buffer of its logits; None on other stages than 0."""
        if not self._stages.is_first:
            return None
        slots = self.inputs.decode_slots[:size]
        captured = pool.record(partial(self.last_step, slots, adapters=adapters))
        self.last_graphs[adapters].add(size, captured)
        return captured.outputs[1]

    # --- on the stream -----------------------------------------------------------------------

    def _begin(self, step: PackedStep, graph: StepShape | None) -> Rest:
        self._move_pages(step)
        if step.has_prompts:
            self.work.ran("mixed", step.shape.size, None if graph is None else graph.size)
            return self._begin_mixed(step, graph)
        return self._begin_decodes(step) if len(step.decode_slots) else _nothing

    def _begin_decodes(self, step: PackedStep) -> Rest:
        num_rows, adapters = len(step.decode_slots), step.adapters
        graphs = self.adapter_graphs if adapters else self.graphs
        size = None if graphs is None else graphs.fitting(num_rows)
        num_tokens = size or num_rows
        self.work.ran("decode", num_rows, size)
        self._stages.receive(num_tokens)
        extras = self._upload(step)
        self.inputs.put_decodes(step.decode_slots, step.changes)
        slots = self.inputs.decode_slots
        if graphs is None or size is None:
            max_len = int(step.decode_positions.max()) + 1
            (residual,) = self.stage_step(slots[:num_rows], max_len, adapters=adapters)
        else:
            (residual,) = graphs[size].replay()
        self._stages.send(residual, returns=True)

        def end() -> Forwarded:
            self.inputs.put_decodes(step.decode_slots, NO_CHANGES)
            self._stages.take_back(num_tokens)
            if size is None:
                tokens, logits = self.last_step(slots[:num_rows], adapters=adapters)
                return Forwarded(logits, slots, None, tokens, extras, [])
            tokens, logits = self.last_graphs[adapters][size].replay()
            is_masked = size in self.masked_graphs and not adapters
            resample = self.masked_graphs[size] if is_masked else None
            return Forwarded(logits, slots, None, tokens, extras, [], resample)

        return end if self._stages.is_first else _nothing

    def _begin_mixed(self, step: PackedStep, graph: StepShape | None) -> Rest:
        num_tokens = step.shape.size if graph is None else graph.size
        self._stages.receive(num_tokens)
        extras = self._upload(step)
        residual = self.mixed.forward(step, graph)[:num_tokens]
        returns = len(step.sampled_slots) > 0 or len(step.prompt_logprobs) > 0
        self._stages.send(residual, returns=returns)
        if not self._stages.is_first:
            self._advance(len(step.sampled_slots))
            return _nothing
        token_slots = self.mixed.token_slots
        if step.prompt_logprobs:  # other steps write there before this one's end
            token_slots = token_slots.clone()

        def end() -> Forwarded:
            hidden = residual
            if returns:
                self._stages.take_back(num_tokens)
                hidden = self._stages.model.last_norm(num_tokens)
            self.inputs.put(step._replace(changes=NO_CHANGES), None)
            return self._logits(step, hidden, token_slots, extras)

        return end

    def _advance(self, num_rows: int) -> None:
        """Advance the slots of the mixed step in the static inputs to their next positions."""
        slots, positions = self.inputs.sample_slots[:num_rows], self.inputs.sample_positions
        self._state.advance(slots, torch.zeros_like(slots), positions[:num_rows])


def _nothing() -> None:
    """The end of a step that this rank has no part in."""
