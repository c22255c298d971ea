"""One step on the device: a `StepPlan` in, launched work out.

`launch` packs the plan on the host and gives the executor `_forward` (page moves, state changes,
forward pass) and `StepSampling.run` (sampling, the copies back); they only enqueue. A step of
decodes only is `decode_step`, eager or from a graph: the same function. Where rows need the host,
`launch` gives only `_forward`, and `HostStep.sample` the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncllm.attention.base import AttentionBackend, AttentionMixer, DecodeRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.graphs.masked_graphs import MaskedGraphs
from asyncllm.graphs.step_graph import StepGraph
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult, TokenMasks
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import Collect, Executor, LaunchedStep
from asyncllm.worker.host_step import HostStep
from asyncllm.worker.inbox import Inbox
from asyncllm.worker.kernels import SlotKernels
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.mixed_forward import MixedForward, duration_key
from asyncllm.worker.mixed_logits import MixedLogits
from asyncllm.worker.result_buffers import ResultBuffers
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.slot_changes import NO_CHANGES, SlotChanges
from asyncllm.worker.slot_sampling import Arrays
from asyncllm.worker.slot_writer import SlotWriter
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_inputs import StepBuilder, StepInputs, StepTokens, padding_prompt
from asyncllm.worker.step_results import prompt_logprobs_of
from asyncllm.worker.step_sampling import Forwarded, StepSampling
from asyncllm.worker.token_masks import TokenMaskBuffer
from asyncllm.worker.work_counts import WorkCounts

Tensors = dict[str, torch.Tensor]
# token ids int32 [rows], rows, prompt lens where the model uses them -> logits [rows, V]
DecodeForward = Callable[[torch.Tensor, DecodeRows, torch.Tensor | None], torch.Tensor]


class ModelRunner:
    def __init__(
        self,
        *,
        model: CausalLM,
        cache: KVCache,
        attention: AttentionBackend,
        state: DeviceState,
        kernels: SlotKernels,
        executor: Executor,
        builder: StepBuilder,
        processors: LogitsProcessors,
        masks: TokenMaskBuffer,
        inbox: Inbox,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._state = state
        self._sampler = sampler = Sampler(state, kernels.sample_slots, kernels.apply_masks)
        self._gather_slots = kernels.gather_slots
        self._write_slots = kernels.write_slots
        self._executor = executor
        self._builder = builder
        self._staging = Staging(device)
        self.graphs: DecodeGraphs | None = None
        self.masked_graphs: MaskedGraphs | None = None  # of the same sizes
        self.work = WorkCounts()
        self.inbox = inbox
        self.slot_writer = SlotWriter(state, inbox, kernels.write_slots)
        self.mixed_forward = MixedForward(
            model,
            attention,
            cache,
            state,
            inbox,
            self._staging,
            self.slot_writer,
            kernels.fill_decodes,
        )
        self.mixed_logits = MixedLogits(model, sampler, inbox)
        results = ResultBuffers(len(state.positions), device)
        self._masks = masks
        self._sampling = StepSampling(sampler, processors, masks, self._staging, results)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the step to the device, a `HostStep` where the plan `needs_host`.

        The plan's effects are as if it were done already.
        """
        inputs = self._builder.build(plan)
        graph, size = None, 0
        if inputs.tokens is not None:
            graph = self.mixed_forward.graph_of(inputs.tokens)
            size = duration_key(inputs.tokens.num_tokens, graph)
        if not plan.needs_host:
            return self._executor.submit(
                lambda: self._sampling.run(inputs, self._forward(inputs, graph)), size
            )
        begun = self._executor.begin(lambda: self._forward(inputs, graph), size)

        def end(masks: TokenMasks) -> LaunchedStep:
            later = self._builder.build_sampling(inputs)  # now: the tokens will move on
            return begun.end(lambda forwarded: self._sampling.run(inputs, forwarded, later, masks))

        return HostStep(end)

    def clear_pages(self, pages: list[int]) -> None:
        """Zero these pages after all that was launched before."""

        def work() -> Collect:
            self._cache.clear_pages(pages)
            return lambda: StepResult([])

        self._executor.submit(work)

    # --- on the stream -----------------------------------------------------------------------

    def _forward(self, inputs: StepInputs, graph: StepGraph | None) -> Forwarded | None:
        """None for swaps alone."""
        plan = inputs.plan
        if plan.swap_out or plan.page_copies or plan.swap_in:  # as in few steps
            self._cache.swap_out(plan.swap_out)
            self._cache.copy_pages(plan.page_copies)
            self._cache.swap_in(plan.swap_in)
        if inputs.tokens is not None:
            return self._mixed_step(inputs, inputs.tokens, graph)
        return self._decode_only(inputs) if plan.decodes else None

    def _decode_only(self, inputs: StepInputs) -> Forwarded:
        tensors = self._tell_decodes(inputs)
        graphs, slots, num_rows = self.graphs, self.inbox.decode_slots, len(inputs.decode_slots)
        size = None if graphs is None else graphs.fitting(num_rows)
        resample = None
        self.work.ran("decode", num_rows, size)
        if graphs is None or size is None:
            max_len = int(inputs.plan.decodes.positions.max()) + 1
            tokens, logits = self.decode_step(slots[:num_rows], max_len)
        else:
            tokens, logits = graphs.replay(size)
            if self.masked_graphs is not None and size in self.masked_graphs:
                resample = partial(self.masked_graphs.replay, size)
        return Forwarded(logits, slots, None, tokens, tensors, [], resample)

    def _tell_decodes(self, inputs: StepInputs) -> Tensors:
        """Which slots decode, if not those of the last step; how slots change."""
        inbox, changes = self.inbox, inputs.changes
        if inbox.takes(changes):
            tensors = self._upload(inputs.arrays)
        else:
            tensors, changes = self._upload(inputs.arrays, changes), NO_CHANGES
        if changes is not NO_CHANGES or not inbox.holds(inputs.decode_slots):
            inbox.put_decodes(inputs.decode_slots, changes)
        if changes is not NO_CHANGES:
            self.slot_writer.write()
        return tensors

    def decode_step(
        self,
        slots: torch.Tensor,
        max_len: int | None = None,
        forward: DecodeForward | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each of `slots` int32 [rows], from and to the device state. Capturable.

        Returns plainly sampled tokens int32 [rows] and logits [rows, V]. `max_len`: the longest
        context, for backends that want it on the host; None under capture. `forward`: by other
        kernels than the layers'.
        """
        state = self._state
        rows = self._gather_slots(state, slots)
        decodes = DecodeRows(rows.block_tables, rows.positions, max_len)
        prompt_lens = state.prompt_lens[slots] if self._model.uses_prompt_lens else None
        logits = (forward or self._layers)(rows.last_tokens, decodes, prompt_lens)
        return self._sampler.plain(logits, slots, rows.next_positions), logits

    def resample(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """A token for each row of a decode step, again: by the masks that were uploaded for them.
        Capturable."""
        return self._sampler.plain(logits, slots, None, self._masks.first(len(slots)))

    def _layers(
        self, token_ids: torch.Tensor, rows: DecodeRows, prompt_lens: torch.Tensor | None
    ) -> torch.Tensor:
        inputs = TokenInputs(token_ids, rows.positions, prompt_lens)
        hidden = self._model.forward(inputs, AttentionMixer(self._attention.decode(rows)))
        return self._model.compute_logits(hidden)

    def _mixed_step(
        self, inputs: StepInputs, step: StepTokens, graph: StepGraph | None
    ) -> Forwarded:
        """Prefill chunks, and the decodes beside them, in one forward pass."""
        num_padded = None if graph is None else graph.num_tokens
        self.work.ran("mixed", step.num_tokens, num_padded)
        if not self.inbox.takes(inputs.changes):
            tensors = self._upload(inputs.arrays, inputs.changes)
            hidden = self.mixed_forward.run(step, graph)
        elif "penalty_slots" in inputs.arrays:  # of decodes too, which count their inputs
            tensors = self._upload(inputs.arrays)
            hidden = self.mixed_forward.run(step, graph, inputs.changes)
        else:
            hidden = self.mixed_forward.run(step, graph, inputs.changes)
            tensors = self._upload(inputs.arrays)  # which only sampling reads
        prompt_logprobs = [
            logprobs
            for wanted in inputs.prompt_logprobs
            for logprobs in prompt_logprobs_of(self._model, hidden, wanted, tensors)
        ]
        tokens, logits = self.mixed_logits.of(hidden, step.num_samples)
        slots, positions = self.inbox.sample_slots, self.inbox.sample_positions
        return Forwarded(logits, slots, positions, tokens, tensors, prompt_logprobs)

    def run_padding(self, num_tokens: int) -> None:
        """A step of one prompt on the padding page, and its first token in the padding slot. On the
        current stream."""
        step = padding_prompt(num_tokens, self._cache.block_size)
        hidden = self.mixed_forward.run(step, self.mixed_forward.graph_of(step))
        tokens, logits = self.mixed_logits.of(hidden, 1)
        if tokens is None:
            inbox = self.inbox
            self._sampler.plain(logits, inbox.sample_slots[:1], inbox.sample_positions[:1])

    def _upload(self, arrays: Arrays, changes: SlotChanges = NO_CHANGES) -> Tensors:
        """All in one copy; changes of slots, penalties and allowed tokens are written."""
        if changes.records is not None:
            arrays = arrays | {"records": changes.records}
        if changes.entries is not None:
            arrays = arrays | {"entries": changes.entries}
        tensors = self._staging.upload(arrays)
        if changes is not NO_CHANGES:
            self._write_slots(self._state, tensors.get("records"), tensors.get("entries"))
        if tensors:
            self._state.apply(tensors)
        return tensors
