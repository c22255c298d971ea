"""A step with prefills: its forward pass and the logits of the rows that sample.

Captured where a size fits, else eager. Both read the step's arrays from the static inputs, or,
where there are more tokens than those hold, from a copy of their own; a captured step has padding
behind its tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from asyncllm.attention.base import AttentionBackend, DecodeRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.full_graphs import FullGraphs
from asyncllm.graphs.piecewise_graphs import PiecewiseGraphs
from asyncllm.graphs.pool import GraphPool, Outputs, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import MixedGraphs, TokenBuffers, forward
from asyncllm.models.base import CausalLM
from asyncllm.step_plan import StepKind, StepShape
from asyncllm.worker.device_state import DeviceState, FillDecodes
from asyncllm.worker.packed_step import NO_CHANGES, SlotChanges, StepTokens
from asyncllm.worker.sampler import Sampler
from asyncllm.worker.staging import Staging
from asyncllm.worker.static_inputs import TOKEN_ARRAYS, SlotWriter, StaticInputs

EAGER_SIZE = 256  # tokens to which steps that are not captured are rounded, to compare them


class MixedStep:
    """Eager until `make_graphs` and captures."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        cache: KVCache,
        state: DeviceState,
        inputs: StaticInputs,
        staging: Staging,
        slot_writer: SlotWriter,
        fill_decodes: FillDecodes,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._attention = attention
        self._cache = cache
        self._state = state
        self._inputs = inputs
        self._staging = staging
        self._slot_writer = slot_writer
        self._fill_decodes = fill_decodes
        self._sampler = sampler
        self.graphs: MixedGraphs | None = None
        self.sample_graphs: SizedGraphs[Recorded] | None = None  # by rows
        self._hidden: torch.Tensor | None = None  # that captured steps leave hidden states in

    def make_graphs(self, hidden: torch.Tensor, most_decodes: int, pool: GraphPool) -> MixedGraphs:
        """Graphs of forward passes: full ones where attention can be captured, else piecewise. None
        is captured yet.

        hidden: the buffer for hidden states [tokens, hidden_size], of all that the static inputs
        take, and at least as many as rows may sample.
        """
        self._hidden = hidden
        self.graphs = self._forward_graphs(hidden, most_decodes, pool)
        self.sample_graphs = SizedGraphs()
        return self.graphs

    def _forward_graphs(
        self, hidden: torch.Tensor, most_decodes: int, pool: GraphPool
    ) -> MixedGraphs:
        inputs, layer = self._inputs, self._model.attention_layers[0]
        dtype = self._cache.layers[0].dtype
        arrays = inputs.token_ids, inputs.positions, inputs.prompt_lens, inputs.write_slots
        buffers = TokenBuffers.around(*arrays, layer, dtype)
        model, attention, read_decodes = self._model, self._attention, self._read_decodes
        step_attention = attention.step_attention(len(inputs.token_ids))
        if step_attention is None:
            return PiecewiseGraphs(
                model, attention, read_decodes, buffers, hidden, inputs.clear, pool
            )
        return FullGraphs(
            model,
            attention,
            step_attention,
            self._slot_writer.launch,
            read_decodes,
            most_decodes,
            buffers,
            hidden,
            inputs.clear,
            pool,
        )

    def graph_shape(self, step: StepTokens) -> StepShape | None:
        """The captured shape that such a step is padded to; None: it runs eagerly."""
        if self.graphs is None:
            return None
        return self.graphs.fitting(len(step.decode_slots), step.prefills)

    def forward(
        self, step: StepTokens, shape: StepShape | None, changes: SlotChanges = NO_CHANGES
    ) -> torch.Tensor:
        """Hidden states [tokens or more, hidden_size], until the next step: decodes, prefills.

        shape: the step's `graph_shape`. changes: as many as the static inputs take; its decodes see
        them. The static inputs have the step's rows afterwards.
        """
        graphs = None if shape is None else self.graphs
        self._inputs.put(step, changes, None if shape is None else shape.size)
        if changes is not NO_CHANGES and (graphs is None or not graphs.writes_changes):
            self._slot_writer.write()
        if graphs is not None and shape is not None:
            return graphs.replay(shape, step.decode_positions, step.prefills)
        tokens, decodes = self._eager_tokens(step), None
        if num_decodes := len(step.decode_slots):
            max_len = int(step.decode_positions.max()) + 1
            decodes = replace(self._read_decodes(num_decodes, tokens), max_len=max_len)
        attend_rows = self._attention.mixed(decodes, step.prefills, tokens.q, tokens.out)
        return forward(self._model, self._attention, tokens, attend_rows)

    def logits(
        self, hidden: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """[rows, V] of the step in the static inputs; before them tokens int32 [rows] if its
        sampling is captured. Of both there may be more, which are padding.

        hidden: of the step's tokens, [tokens or more, hidden_size].
        """
        rows = self._inputs.sample_tokens
        if not num_rows:  # no prefill reached its last chunk
            return rows[:0], hidden[:0]
        size = None if self.sample_graphs is None else self.sample_graphs.fitting(num_rows)
        if self.sample_graphs is None or size is None:
            return None, self._model.compute_logits(hidden[rows[:num_rows]])
        if hidden is not self._hidden:  # of an eager step: graphs read the buffer
            assert self._hidden is not None
            torch.index_select(hidden, 0, rows[:num_rows], out=self._hidden[:num_rows])
            torch.arange(num_rows, out=rows[:num_rows])
        tokens, logits = self.sample_graphs[size].replay()
        return tokens, logits

    def capture_sampling(self, size: int, pool: GraphPool) -> None:
        """Logits and plain sampling of `size` rows, those beyond the step's being slot 0's."""
        inputs, hidden = self._inputs, self._hidden
        assert hidden is not None and self.sample_graphs is not None
        rows, slots, positions = (
            tensor[:size].zero_()  # those of the last step
            for tensor in (inputs.sample_tokens, inputs.sample_slots, inputs.sample_positions)
        )

        def sample() -> Outputs:
            logits = self._model.compute_logits(hidden.index_select(0, rows))
            return self._sampler.plain(logits, slots, positions), logits

        self.sample_graphs.add(size, pool.record(sample))

    def _read_decodes(self, num_rows: int, tokens: TokenBuffers) -> DecodeRows:
        slots = self._inputs.decode_slots[:num_rows]
        return self._fill_decodes(self._state, slots, tokens, self._cache.block_size)

    def _eager_tokens(self, step: StepTokens) -> TokenBuffers:
        tokens = TokenBuffers.zeros(
            step.num_tokens,
            self._model.attention_layers[0],
            self._cache.layers[0].dtype,
            self._state.positions.device,
        )
        columns, write_slots = self._staging.upload((step.tokens, step.write_slots))
        first = len(step.decode_slots)
        for name, values in zip(TOKEN_ARRAYS, columns, strict=True):
            getattr(tokens, name)[first:].copy_(values)
        tokens.write_slots[first:].copy_(write_slots)
        return tokens


def step_shape(step: StepTokens, graph: StepShape | None) -> StepShape:
    """The shape that predicts the step's duration: its graph's, or its own, rounded."""
    if graph is not None:
        return graph
    kind = StepKind.of(len(step.decode_slots), step.prefills.num_tokens)
    return StepShape(kind, -(-step.num_tokens // EAGER_SIZE) * EAGER_SIZE)
