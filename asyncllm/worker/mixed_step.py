"""Mixed steps, which have prefills: the forward pass, and logits of the rows that sample.

A step runs in a graph if a captured size fits, else eagerly. Both read the step's arrays from the
static inputs, or from a separate copy if there are too many tokens. A captured step has padding
after its tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncllm.attention.backend import AttentionBackend
from asyncllm.attention.base import (
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
    StepMixer,
    no_recurrence,
)
from asyncllm.attention.state_cache import StateBackend
from asyncllm.graphs.mixed_graphs import MixedGraphs
from asyncllm.graphs.pool import GraphPool, Outputs, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.kernels.recurrent.records import Recur
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.step_plan import StepShape
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.kernels import SlotKernels
from asyncllm.worker.packed_step import NO_CHANGES, PackedStep
from asyncllm.worker.staging import Staging
from asyncllm.worker.static_inputs import TOKEN_ARRAYS, StaticInputs

EAGER_SIZE = 256  # token counts of eager steps are rounded to this, to compare their durations


@dataclass(eq=False)
class MixedStep:
    """Runs all steps eagerly, until `make_graphs` and captures."""

    model: CausalLM
    attention: AttentionBackend
    states: StateBackend | None  # of recurrent layers
    state: DeviceState
    kernels: SlotKernels
    inputs: StaticInputs
    staging: Staging
    block_size: int
    lora: LoRALayers | None
    mesh: Mesh
    dtype: torch.dtype  # of queries and hidden states

    def __post_init__(self) -> None:
        self.graphs: MixedGraphs | None = None
        self.sample_graphs: SizedGraphs[Recorded] = SizedGraphs()  # by the number of rows
        self._hidden: torch.Tensor | None = None  # where captured steps write hidden states
        self.token_slots = self.inputs.slots  # the slots of the last step's tokens

    def make_graphs(self, hidden: torch.Tensor, most_decodes: int, pool: GraphPool) -> MixedGraphs:
        """The graphs of forward passes, none captured yet: full ones if attention can be captured,
        else piecewise.

        hidden: the buffer for hidden states [tokens, hidden_size]. It takes as many tokens as the
        static inputs, and at least as many as rows may sample.
        """
        self._hidden, inputs = hidden, self.inputs
        zeros = self._zeros(len(inputs.token_ids))
        arrays = inputs.token_ids, inputs.positions, inputs.slots, inputs.write_slots
        buffers = TokenBuffers(*arrays, zeros.q, zeros.out)

        def forward_to_buffer(
            tokens: TokenBuffers, attend_rows: AttendRows, adapters: bool, recur: Recur
        ) -> None:
            output = self._forward(tokens, attend_rows, adapters, recur)
            hidden[: len(output)].copy_(output)

        variants = (False,) if self.lora is None else (True, False)
        is_recurrent = self.states is not None  # states need rows from the host
        self.graphs = MixedGraphs(
            None if is_recurrent else self.attention.step_attention(len(inputs.token_ids)),
            self._bind_attention,
            self._bind_states if is_recurrent else None,
            inputs.launch_changes,
            self._read_decodes,
            most_decodes,
            buffers,
            forward_to_buffer,
            pool,
            variants,
        )
        return self.graphs

    def graph_shape(self, step: PackedStep) -> StepShape | None:
        """The captured shape that a step is padded to; None: it runs eagerly."""
        if step.common is not None:
            return step.common.shape if step.common.in_graph else None
        if self.graphs is None:
            return None
        return self.graphs.fitting(len(step.decode_slots), step.prefills, step.adapters)

    def forward(self, step: PackedStep, shape: StepShape | None) -> torch.Tensor:
        """Hidden states [tokens or more, hidden_size] of decodes, then prefills; valid until the
        next step.

        shape: the step's `graph_shape`. It also applies the step's slot changes, and puts its rows
        into the static inputs.
        """
        graphs = None if shape is None else self.graphs
        self.inputs.put(step, None if shape is None else shape.size)
        if step.changes is not NO_CHANGES and (graphs is None or not graphs.is_full):
            self.inputs.write_changes()
        if graphs is not None and shape is not None:
            assert self._hidden is not None
            graphs.replay(shape, step.decode_positions, step.prefills)
            self.token_slots = self.inputs.slots
            return self._hidden
        tokens = self._eager_tokens(step)
        self.token_slots = tokens.slots
        attend_rows = self._bind_attention(tokens, step.decode_positions, step.prefills)
        recur: Recur = no_recurrence
        if self.states is not None:
            recur = self._bind_states(len(step.decode_slots), step.prefills)
        return self._forward(tokens, attend_rows, step.adapters, recur)

    def logits(
        self, hidden: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Sampled tokens int32 [rows], or None if sampling is not captured, and logits [rows, V].
        Both may have padding rows at the end.

        hidden: of the step in the static inputs, [tokens or more, hidden_size].
        """
        rows = self.inputs.sample_tokens
        if not num_rows:  # no prefill has reached its last chunk
            return rows[:0], hidden[:0]
        size = self.sample_graphs.fitting(num_rows)
        if size is None:
            slots = self.inputs.sample_slots[:num_rows]
            return None, self._logits(hidden[rows[:num_rows]], slots)
        if hidden is not self._hidden:  # of an eager step: copy them to the graphs' buffer
            assert self._hidden is not None
            torch.index_select(hidden, 0, rows[:num_rows], out=self._hidden[:num_rows])
            torch.arange(num_rows, out=rows[:num_rows])
        tokens, logits = self.sample_graphs[size].replay()
        return tokens, logits

    def capture_sampling(self, size: int, pool: GraphPool) -> None:
        """Capture logits and plain sampling of `size` rows; padding rows are of slot 0."""
        inputs, hidden = self.inputs, self._hidden
        assert hidden is not None

        def sample() -> Outputs:
            rows = hidden.index_select(0, inputs.sample_tokens[:size])
            logits = self._logits(rows, inputs.sample_slots[:size])
            return self.sample(logits), logits

        self.sample_graphs.add(size, pool.record(sample))

    def logits_of_tokens(
        self, hidden: torch.Tensor, slots: torch.Tensor, first: int, num: int
    ) -> torch.Tensor:
        """Logits [num, V] of a step's tokens from `first` on. slots: the step's `token_slots`."""
        tokens = slice(first, first + num)
        return self._logits(hidden[tokens], slots[tokens])

    def _logits(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits of rows of these slots, with their adapters, if any. Capturable."""
        if self.lora is None:
            return self.model.compute_logits(hidden)
        self.lora.select(self.state.adapters[slots])
        try:
            return self.model.compute_logits(hidden)
        finally:
            self.lora.select(None)

    def _forward(
        self,
        tokens: TokenBuffers,
        attend_rows: AttendRows,
        adapters: bool,
        recur: Recur = no_recurrence,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden_size]. Capturable. attend_rows: called with each layer,
        after its keys and values are written."""
        state, slots = self.state, tokens.slots
        if self.lora is not None:
            self.lora.select(state.adapters[slots] if adapters else None)
        prompt_lens = state.prompt_lens[slots] if self.model.uses_prompt_lens else None
        out = tokens.out.flatten(1)

        def attend(
            layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
        ) -> torch.Tensor:
            self.attention.write(layer, qkv, rotation, tokens.write_slots, tokens.q)
            attend_rows(layer)
            return out

        inputs = TokenInputs(tokens.token_ids, tokens.positions, prompt_lens)
        with self.mesh.rows_of(slots):
            return self.model.forward(inputs, StepMixer(attend, recur))

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Plainly sampled tokens, int32 [rows], of the first rows in the static inputs.
        Capturable."""
        rows = slice(len(logits))
        slots, positions = self.inputs.sample_slots[rows], self.inputs.sample_positions[rows]
        return self.kernels.sample_slots(self.state, logits, slots, positions, None)

    def _read_decodes(self, num_rows: int, tokens: TokenBuffers) -> DecodeRows:
        slots = self.inputs.decode_slots[:num_rows]
        return self.kernels.fill_decodes(self.state, slots, tokens, self.block_size)

    def _bind_attention(
        self, tokens: TokenBuffers, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> AttendRows:
        """Attention of a step whose rows and pages come from the host."""
        decodes = None
        if num_decodes := len(decode_positions):
            max_len = int(decode_positions.max()) + 1
            decodes = replace(self._read_decodes(num_decodes, tokens), max_len=max_len)
        return self.attention.mixed(decodes, prefills, tokens.q, tokens.out)

    def _bind_states(self, num_decodes: int, prefills: PrefillRows) -> Recur:
        """Recurrences of a step whose rows come from the host."""
        assert self.states is not None
        return self.states.mixed(self.inputs.decode_slots[:num_decodes], prefills)

    def _zeros(self, num_tokens: int) -> TokenBuffers:
        layers, device = self.model.attention_layers, self.inputs.token_ids.device
        heads = (layers[0].num_heads, layers[0].head_dim) if layers else (0, 0)
        num_groups = len(self.inputs.write_slots)
        return TokenBuffers.zeros(num_tokens, heads, num_groups, self.dtype, device)

    def _eager_tokens(self, step: PackedStep) -> TokenBuffers:
        tokens, first = self._zeros(step.shape.size), len(step.decode_slots)
        (columns,) = self.staging.upload((step.tokens,))
        num_arrays = len(TOKEN_ARRAYS)
        for buffer, values in zip(tokens[:num_arrays], columns, strict=False):
            buffer[first:].copy_(values)
        tokens.write_slots[:, first:].copy_(columns[num_arrays:])
        return tokens


def eager_shape(step: PackedStep) -> StepShape:
    """An eager step's shape, rounded, by which its duration is predicted."""
    kind, num_tokens, adapters = step.shape
    return StepShape(kind, -(-num_tokens // EAGER_SIZE) * EAGER_SIZE, adapters)
