"""One step on the device: a `StepPlan` in, launched work out.

`launch` packs the plan on the host and gives the executor `_forward` (page moves, state changes,
forward pass) and `_sample` (sampling, the copies back); they only enqueue. A step of decodes only
is `decode_step`, eager or from a graph: the same function. Where rows need the host, `launch` gives
only `_forward`, and `HostStep.sample` the rest; what the graph sampled meanwhile is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncllm.attention.base import AttentionBackend, DecodeRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.graphs.pool import GraphPool
from asyncllm.graphs.sample_graphs import SampleGraphs
from asyncllm.graphs.step_graph import StepGraph
from asyncllm.models.base import CausalLM
from asyncllm.step_plan import StepPlan
from asyncllm.types import NO_MASKS, StepResult, TokenMasks
from asyncllm.worker.decode_rows import FillDecodes
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import Collect, Executor, LaunchedStep
from asyncllm.worker.host_step import HostStep
from asyncllm.worker.inbox import Inbox
from asyncllm.worker.logits_processors import LogitsProcessors
from asyncllm.worker.mixed_forward import MixedForward, duration_key
from asyncllm.worker.result_buffers import ResultBuffers
from asyncllm.worker.sampler import LogprobTensors, Sampler
from asyncllm.worker.slot_changes import WriteSlots
from asyncllm.worker.slot_rows import GatherSlots
from asyncllm.worker.slot_sampling import PLAIN, Arrays, Feature
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_inputs import StepBuilder, StepInputs, StepTokens
from asyncllm.worker.step_results import Sampled, fetch, prompt_logprobs_of
from asyncllm.worker.token_masks import RowMasks, TokenMaskBuffer
from asyncllm.worker.warm_up import WarmUp
from asyncllm.worker.work_counts import WorkCounts

Tensors = dict[str, torch.Tensor]
# token ids int32 [rows], rows, prompt lens where the model uses them -> logits [rows, V]
DecodeForward = Callable[[torch.Tensor, DecodeRows, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the forward pass leaves for sampling, on the device."""

    logits: torch.Tensor  # [rows, V], raw
    slots: torch.Tensor  # int32 [rows]
    positions: torch.Tensor | None  # int32 [rows], of the new tokens; None: as the slots say
    tokens: torch.Tensor | None  # int32 [rows], sampled plainly already, the slots advanced
    tensors: Tensors  # the step's uploaded arrays
    prompt_logprobs: list[LogprobTensors]


class ModelRunner:
    def __init__(
        self,
        *,
        model: CausalLM,
        cache: KVCache,
        attention: AttentionBackend,
        state: DeviceState,
        sampler: Sampler,
        gather_slots: GatherSlots,
        fill_decodes: FillDecodes,
        write_slots: WriteSlots,
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
        self._sampler = sampler
        self._gather_slots = gather_slots
        self._fill_decodes = fill_decodes
        self._write_slots = write_slots
        self._executor = executor
        self._builder = builder
        self._processors = processors
        self.masks = masks
        self._staging = Staging(device)
        self._inbox = inbox
        self._results = ResultBuffers(len(state.positions), device)
        self.graphs: DecodeGraphs | None = None
        self.sample_graphs: SampleGraphs | None = None
        self.work = WorkCounts()
        self.mixed_forward = MixedForward(
            model, attention, cache, state, inbox, self._staging, fill_decodes
        )

    @property
    def warm_up(self) -> WarmUp:
        """Each its own: one that the runner kept would hold the runner, a circle."""
        return WarmUp(
            self._cache,
            self.run_tokens,
            self._state,
            self._fill_decodes,
            self._write_slots,
            self._sampler,
            self.masks,
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the step to the device, a `HostStep` where the plan `needs_host`.

        The plan's effects are as if it were done already.
        """
        inputs = self._builder.build(plan)
        graph, size = None, 0
        if inputs.tokens is not None:
            graph = self.mixed_forward.graph_of(inputs.tokens)
            size = duration_key(plan.num_tokens, graph)
        if not plan.needs_host:
            return self._executor.submit(
                lambda: self._sample(inputs, self._forward(inputs, graph)), size
            )
        begun = self._executor.begin(lambda: self._forward(inputs, graph), size)

        def end(masks: TokenMasks) -> LaunchedStep:
            later = self._builder.build_sampling(inputs)  # now: the tokens will move on
            return begun.end(lambda forwarded: self._sample(inputs, forwarded, later, masks))

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
        self._cache.swap_out(plan.swap_out)
        self._cache.copy_pages(plan.page_copies)
        self._cache.swap_in(plan.swap_in)
        if inputs.tokens is not None:
            return self._mixed_step(inputs, inputs.tokens, graph)
        return self._decode_only(inputs) if plan.decodes else None

    def _sample(
        self,
        inputs: StepInputs,
        forwarded: Forwarded | None,
        later: Arrays | None = None,
        masks: TokenMasks = NO_MASKS,
    ) -> Collect:
        """`later`, `masks`: what a step that `needs_host` is told after its forward pass."""
        if forwarded is None:
            return lambda: StepResult([])
        tokens = forwarded.tokens
        failures: dict[int, Exception] = {}
        row_masks = None
        if len(masks.rows):
            row_masks = self.masks.upload(masks.rows, len(forwarded.slots))
        if inputs.features & ~PLAIN:
            tokens, failures = self._sample_full(inputs, forwarded, later, row_masks)
        elif tokens is None or row_masks is not None:
            tokens = self._sampler.plain(
                forwarded.logits, forwarded.slots, forwarded.positions, row_masks
            )
        sampled = Sampled(
            tokens,
            forwarded.logits,
            forwarded.tensors.get("logprob_ids"),
            forwarded.prompt_logprobs,
            failures,
        )
        return fetch(inputs, sampled, self._results)

    def _decode_only(self, inputs: StepInputs) -> Forwarded:
        graphs, num_rows = self.graphs, len(inputs.decode_slots)
        padded = graphs.padded_slots(inputs.decode_slots) if graphs is not None else None
        self.work.ran("decode", num_rows, None if padded is None else len(padded))
        if graphs is None or padded is None:
            tensors = self._upload({**inputs.arrays, "decode_slots": inputs.decode_slots})
            slots = tensors["decode_slots"]
            tokens, logits = self.decode_step(slots, inputs.max_decode_len)
        else:
            arrays = dict(inputs.arrays)
            if not graphs.holds(padded):
                arrays["decode_slots"] = padded
            tensors = self._upload(arrays)
            if "decode_slots" in tensors:
                graphs.set_slots(padded, tensors["decode_slots"])
            tokens, logits = (output[:num_rows] for output in graphs.replay(padded))
            slots = graphs.slots[:num_rows]
        return Forwarded(logits, slots, None, tokens, tensors, [])

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

    def _layers(
        self, token_ids: torch.Tensor, rows: DecodeRows, prompt_lens: torch.Tensor | None
    ) -> torch.Tensor:
        attend = self._attention.decode(rows)
        hidden = self._model.forward(token_ids, rows.positions, prompt_lens, attend)
        return self._model.compute_logits(hidden)

    def _mixed_step(
        self, inputs: StepInputs, step: StepTokens, graph: StepGraph | None
    ) -> Forwarded:
        """Prefill chunks, and the decodes beside them, in one forward pass."""
        num_padded = None if graph is None else graph.num_tokens
        self.work.ran("mixed", step.num_tokens, num_padded)
        # Prefills read nothing of the slots: without decodes they need not wait for the changes.
        if len(step.decode_slots):
            tensors = self._upload(inputs.arrays)
            hidden = self.mixed_forward.run(step, graph)
        else:
            hidden = self.mixed_forward.run(step, graph)
            tensors = self._upload(inputs.arrays)
        prompt_logprobs = [
            logprobs
            for wanted in inputs.prompt_logprobs
            for logprobs in prompt_logprobs_of(self._model, hidden, wanted, tensors)
        ]
        tokens, logits = self._logits(hidden, step.num_samples)
        slots, positions = self._sampled_rows(step.num_samples)
        return Forwarded(logits, slots, positions, tokens, tensors, prompt_logprobs)

    def _logits(
        self, hidden: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """[rows, V], of the rows that the inbox says; tokens int32 [rows] if sampled already."""
        rows = self._inbox.sample_tokens[:num_rows]
        if num_rows and self.sample_graphs is not None and self.sample_graphs.takes(num_rows):
            return self.sample_graphs.replay(hidden, rows)
        # Where no prefill reached its last chunk, there is nothing to sample.
        tokens = None if num_rows else rows
        return tokens, self._model.compute_logits(hidden[rows])

    def _sampled_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions int32 [rows] of the step's samples."""
        inbox = self._inbox
        return inbox.sample_slots[:num_rows], inbox.sample_positions[:num_rows]

    def run_tokens(self, step: StepTokens) -> None:
        """The work of a step with prefills, sampled plainly. On the current stream."""
        hidden = self.mixed_forward.run(step, self.mixed_forward.graph_of(step))
        tokens, logits = self._logits(hidden, step.num_samples)
        if tokens is None:
            self._sampler.plain(logits, *self._sampled_rows(len(logits)))

    def make_sample_graphs(self, buffer: torch.Tensor, pool: GraphPool) -> SampleGraphs:
        """buffer: for hidden states of the most rows [rows, hidden_size]. None is captured yet."""

        def sample(
            hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._model.compute_logits(hidden)
            return self._sampler.plain(logits, slots, positions), logits

        return SampleGraphs(sample, buffer, *self._sampled_rows(len(buffer)), pool)

    def _sample_full(
        self,
        inputs: StepInputs,
        forwarded: Forwarded,
        later: Arrays | None,
        masks: RowMasks | None,
    ) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Tokens int32 [rows], and what processors raised, by row."""
        edits = forwarded.tensors if later is None else self._staging.upload(later)
        failures: dict[int, Exception] = {}

        def process(logits: torch.Tensor) -> None:
            failures.update(self._processors.apply(logits, inputs.plan.sampled))

        tokens = self._sampler.full(
            forwarded.logits,
            forwarded.slots,
            forwarded.positions,
            inputs.features,
            edits,
            masks,
            process if inputs.features & Feature.PROCESS else None,
        )
        return tokens, failures

    def _upload(self, arrays: Arrays) -> Tensors:
        tensors = self._staging.upload(arrays)
        if tensors:
            records, entries = tensors.get("slot_inits"), tensors.get("table_entries")
            if records is not None or entries is not None:
                self._write_slots(self._state, records, entries)
            self._state.apply(tensors)
        return tensors
