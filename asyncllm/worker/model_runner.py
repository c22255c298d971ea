"""Runs a step on the device: takes a `StepPlan`, launches its work.

`launch` packs the plan into arrays and hands two functions to the executor, which only enqueue
device work: `_forward` (page moves, slot changes, forward pass) and `StepSampling.run` (sampling,
copies to the host). A decode step is `decode_step`, run eagerly or captured in a graph. If a step
has host rows, `launch` hands over `_forward` alone and `HostStep.sample` launches the rest. The
same holds for all steps of a pipeline's stages (staged_runner.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from asyncllm.attention.backend import AttentionBackend
from asyncllm.attention.base import DecodeRows, StepMixer, no_recurrence
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.state_cache import StateBackend
from asyncllm.config import EngineConfig
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.graphs.pool import Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.step_plan import StepKind, StepPlan, StepShape
from asyncllm.types import PADDING_SLOT, LaunchedStep, StepResult
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import Collect, Executor, HostStep
from asyncllm.worker.kernels import SlotKernels, share_tokens
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.mixed_step import MixedStep, eager_shape
from asyncllm.worker.packed_step import (
    NO_DEVICE_EXTRAS,
    NO_EXTRAS,
    NO_ROWS,
    DeviceExtras,
    PackedStep,
    padding_prompt,
)
from asyncllm.worker.ranks.group import WorkerGroup
from asyncllm.worker.ranks.messages import Kind, step_content
from asyncllm.worker.staging import ResultBuffers, Staging
from asyncllm.worker.static_inputs import StaticInputs
from asyncllm.worker.step_packer import StepPacker
from asyncllm.worker.step_sampling import Forwarded, StepSampling, prompt_logprobs
from asyncllm.worker.token_masks import TokenMaskBuffer
from asyncllm.worker.work_counts import WorkCounts

# (token ids int32 [rows], rows, prompt lens if the model uses them) -> logits [rows, V]
DecodeForward = Callable[[torch.Tensor, DecodeRows, torch.Tensor | None], torch.Tensor]
# Completes a forward pass. None: no logits on this rank, or none in this step.
Rest = Callable[[], Forwarded | None]


class ModelRunner:
    in_parts = False  # whether `launch` returns a `HostStep` for every step

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        cache: KVCache,
        attention: AttentionBackend,
        states: StateBackend | None,
        state: DeviceState,
        kernels: SlotKernels,
        executor: Executor,
        processors: LogitsProcessors,
        masks: TokenMaskBuffer,
        lora: LoRALayers | None,
        mesh: Mesh,
        group: WorkerGroup | None,
    ) -> None:
        """group: on rank 0, the other ranks."""
        self._group, self._mesh = group, mesh
        own = share_tokens(kernels.sample_slots, mesh)
        fully = kernels.sample_slots if mesh.config.rank == 0 else own
        kernels = replace(kernels, sample_slots=own)
        self._model = model
        self.lora = lora
        self._cache = cache
        self._attention = attention
        self._states = states
        self._state = state
        self._kernels = kernels
        self._executor = executor
        self._masks = masks
        self.packer = StepPacker(config.num_slots, config.block_size)
        device = state.positions.device
        self._staging = staging = Staging(device, num_ahead=mesh.config.pp)
        self.graphs: DecodeGraphs | None = None
        self.adapter_graphs: DecodeGraphs | None = None  # of steps with adapters
        self.masked_graphs: SizedGraphs[Recorded] = SizedGraphs()  # `resample`, by the same sizes
        self._begun: deque[HostStep] = deque()  # steps whose sampling is not launched yet
        self.work = WorkCounts()
        most_tokens = max(config.prefill_graph_sizes, default=0)
        self.inputs = StaticInputs(most_tokens, config.num_slots, state, kernels.write_slots)
        dtype = getattr(torch, config.dtype)
        self.mixed = MixedStep(
            model,
            attention,
            states,
            state,
            kernels,
            self.inputs,
            staging,
            config.block_size,
            lora,
            mesh,
            dtype,
        )
        results = ResultBuffers(config.num_slots, device)
        self._sampling = StepSampling(state, fully, processors, masks, staging, results, mesh)

    def launch(self, plan: StepPlan, step: PackedStep | None = None) -> LaunchedStep:
        """Enqueue the step. Returns a `HostStep` if the plan `needs_host`, or if `in_parts`.

        Work that is launched later finds the device state as the step leaves it. step: the packed
        plan, by `CommonSteps`.
        """
        graph = None
        if step is None:
            step = self.packer.pack(plan)
        shape = StepShape(StepKind.DECODE, len(step.decode_slots), step.adapters)
        if step.has_prompts:
            graph = self.mixed.graph_shape(step)
            shape = graph or eager_shape(step)
        if self._group is not None:
            self._group.send(Kind.STEP, *step_content(step))
        if not (step.needs_host or self.in_parts):
            return self._executor.submit(
                lambda: self._sampling.run(step, plan, self._forward(step, graph)), shape
            )
        end = self._executor.begin(lambda: self._begin(step, graph), shape)

        def sample(masked_rows: np.ndarray) -> LaunchedStep:
            # Packed now, as sequences grow before the device gets here.
            edits = self.packer.pack_edits(step) if step.needs_host else None
            if self._group is not None:
                self._group.send(Kind.SAMPLE, masked_rows.size > 0)
            self._begun.popleft()
            return end(lambda rest: self._sampling.run(step, plan, rest(), edits, masked_rows))

        self._begun.append(HostStep(sample))
        return self._begun[-1]

    def end_begun(self) -> None:
        """Launch the sampling of all begun steps, after a failure: other ranks wait for it."""
        while self._begun:
            self._begun[0].sample(NO_ROWS)

    def follow(self, step: PackedStep) -> Callable[[bool], object] | None:
        """Run rank 0's step on another rank. For a `HostStep` it returns the function that launches
        the sampling, to be called with whether rank 0 sampled with masks."""
        graph = self.mixed.graph_shape(step) if step.has_prompts else None
        end = self._executor.begin(lambda: self._begin(step, graph))

        def sample(is_masked: bool) -> None:
            end(lambda rest: self._sampling.follow(step, rest(), is_masked))

        if step.needs_host or self.in_parts:
            return sample
        sample(False)
        return None

    def clear_pages(self, pages: list[int]) -> None:
        """Zero these pages, after all work that is launched already."""

        def work() -> Collect:
            self._cache.clear_pages(pages)
            return lambda: StepResult([])

        self._executor.submit(work)

    # --- on the stream -----------------------------------------------------------------------

    def _begin(self, step: PackedStep, graph: StepShape | None) -> Rest:
        forwarded = self._forward(step, graph)
        return lambda: forwarded

    def _forward(self, step: PackedStep, graph: StepShape | None) -> Forwarded | None:
        """None if the step only moves pages."""
        self._move_pages(step)
        if self._states is not None:
            self._states.cache.before_step(step.states)
        if step.has_prompts:
            return self._mixed_step(step, graph)
        return self._decode_only(step) if len(step.decode_slots) else None

    def _move_pages(self, step: PackedStep) -> None:
        self._cache.swap_out(step.swap_out)
        self._cache.copy_pages(step.page_copies)
        self._cache.swap_in(step.swap_in)

    def _decode_only(self, step: PackedStep) -> Forwarded:
        extras = self._upload(step)
        self.inputs.put_decodes(step.decode_slots, step.changes)
        slots, num_rows = self.inputs.decode_slots, len(step.decode_slots)
        graphs = self.adapter_graphs if step.adapters else self.graphs
        size = None if graphs is None else graphs.fitting(num_rows)
        if step.common is not None:
            size = step.common.shape.size if step.common.in_graph else None
        self.work.ran("decode", num_rows, size, step.num_padding)
        resample = None
        if graphs is None or size is None:
            max_len = int(step.decode_positions.max()) + 1
            tokens, logits = self.decode_step(slots[:num_rows], max_len, adapters=step.adapters)
        else:
            tokens, logits = graphs[size].replay()
            if size in self.masked_graphs and not step.adapters:
                resample = self.masked_graphs[size]
        return Forwarded(logits, slots, None, tokens, extras, [], resample)

    def decode_step(
        self,
        slots: torch.Tensor,
        max_len: int | None = None,
        forward: DecodeForward | None = None,
        *,
        adapters: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode one token for each of `slots`, int32 [rows]. Capturable.

        It reads and updates the device state. Returns sampled tokens int32 [rows] and logits
        [rows, V].
        max_len: the longest context, for backends that need it on the host; None under capture.
        forward: another implementation of the model's forward pass, such as the persistent kernel.
        adapters: whether rows may have LoRA adapters.
        """
        last_tokens, next_positions, rows, prompt_lens = self._gather(slots, max_len, adapters)
        if forward is not None:
            logits = forward(last_tokens, rows, prompt_lens)
        else:
            hidden = self._layers(slots, last_tokens, rows, prompt_lens)
            logits = self._model.compute_logits(hidden)
        return self._kernels.sample_slots(self._state, logits, slots, next_positions, None), logits

    def _gather(
        self, slots: torch.Tensor, max_len: int | None, adapters: bool
    ) -> tuple[torch.Tensor, torch.Tensor, DecodeRows, torch.Tensor | None]:
        """Input tokens, positions of the tokens to sample, rows, and prompt lens if the model uses
        them, of these slots. Selects their adapters."""
        state = self._state
        if self.lora is not None:
            self.lora.select(state.adapters[slots] if adapters else None)
        last_tokens, next_positions, rows = self._kernels.gather_slots(state, slots)
        prompt_lens = state.prompt_lens[slots] if self._model.uses_prompt_lens else None
        return last_tokens, next_positions, replace(rows, max_len=max_len), prompt_lens

    def resample(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Sample a decode step a second time, with the uploaded masks: int32 [rows]. Capturable."""
        masks = self._masks.first(len(slots))
        return self._kernels.sample_slots(self._state, logits, slots, None, masks)

    def _layers(
        self,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        rows: DecodeRows,
        prompt_lens: torch.Tensor | None,
    ) -> torch.Tensor:
        """The model's `forward`."""
        inputs = TokenInputs(token_ids, rows.positions, prompt_lens)
        recur = no_recurrence if self._states is None else self._states.decode(slots)
        with self._mesh.rows_of(slots):
            return self._model.forward(inputs, StepMixer(self._attention.decode(rows), recur))

    def _mixed_step(self, step: PackedStep, graph: StepShape | None) -> Forwarded:
        """Decodes and prefill chunks in one forward pass."""
        size = None if graph is None else graph.size
        self.work.ran("mixed", step.shape.size, size, step.num_padding)
        if step.extras.output_tokens is not None:  # decodes add their inputs to these counts
            extras = self._upload(step)
            hidden = self.mixed.forward(step, graph)
        else:
            hidden = self.mixed.forward(step, graph)
            extras = self._upload(step)  # only sampling reads them
        if self._states is not None:
            self._states.cache.after_step(step.states)
        return self._logits(step, hidden, self.mixed.token_slots, extras)

    def _logits(
        self,
        step: PackedStep,
        hidden: torch.Tensor,
        token_slots: torch.Tensor,
        extras: DeviceExtras,
    ) -> Forwarded:
        """Logits and prompt logprobs of a mixed step, from hidden states and its tokens' slots."""
        logits_of = partial(self.mixed.logits_of_tokens, hidden, token_slots)
        of_prompts = prompt_logprobs(step.prompt_logprobs, extras, logits_of)
        sampled, logits = self.mixed.logits(hidden, len(step.sampled_slots))
        slots, positions = self.inputs.sample_slots, self.inputs.sample_positions
        return Forwarded(logits, slots, positions, sampled, extras, of_prompts)

    def run_padding(self, num_tokens: int) -> None:
        """Run a prefill of the padding page on the current stream, and sample in the padding
        slot. It takes as long as one of a sequence's."""
        step = self.padding_prompt(num_tokens, token_slot=PADDING_SLOT + 1)
        hidden = self.mixed.forward(step, self.mixed.graph_shape(step))
        tokens, logits = self.mixed.logits(hidden, 1)
        if tokens is None:
            self.mixed.sample(logits)

    def padding_prompt(self, num_tokens: int, token_slot: int = PADDING_SLOT) -> PackedStep:
        """A step of one prompt on the padding page and slot. token_slot: of its tokens."""
        num_groups, vocab_size = len(self._state.block_tables), self._state.in_prompt.shape[1]
        shape = num_tokens, self._cache.block_size, num_groups, vocab_size
        return padding_prompt(*shape, token_slot)

    def _upload(self, step: PackedStep) -> DeviceExtras:
        """Copy sampling inputs that few steps have; updates penalties and allowed tokens."""
        if step.extras is NO_EXTRAS:
            return NO_DEVICE_EXTRAS
        extras: DeviceExtras = self._staging.upload(step.extras)
        self._state.apply(extras)
        return extras
