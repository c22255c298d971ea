"""CUDA graphs of mixed steps, by the number of tokens: full, or piecewise.

If attention reads a step's rows on the device (`StepAttention`), a full graph holds the whole step,
which is then a single launch; 28 layers in pieces would cost the host some 3 ms. Each size is
captured twice: for prefills only, and for decodes followed by prefills.

Otherwise graphs are piecewise: they break at each layer's attention and at each recurrence, which a
replay launches between them, with rows and pages from the host:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden

A recurrence's inputs and output lie where the pieces keep them. All sizes read and write the same
buffers; tokens after the step's are padding. With LoRA enabled, both kinds are captured again for
steps with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from asyncllm.attention.base import (
    AttendRows,
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    StepAttention,
    no_recurrence,
)
from asyncllm.attention.recurrence import new_output, tokens_of
from asyncllm.graphs.pool import Graph, GraphPool, weak_alias
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.kernels.recurrent.records import Recur, Recurrence, StateLayer
from asyncllm.step_plan import StepKind, StepShape

# (tokens, attention to call after each layer's write, whether tokens have adapters, recurrences):
# writes hidden states to the buffer of captured steps
Forward = Callable[[TokenBuffers, AttendRows, bool, Recur], object]
# (tokens, positions of decodes int32 [decodes], prefills) -> attention of rows from the host
BindAttention = Callable[[TokenBuffers, np.ndarray, PrefillRows], AttendRows]
KINDS = (StepKind.MIXED, StepKind.PREFILL)
# (the step's attention, its recurrences, its number of tokens): launched between two pieces
Break = Callable[[AttendRows, Recur, int], None]


@dataclass(eq=False)
class Captured:
    """The graphs of a size, in the order of replay, and what a replay launches between them."""

    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)

    def attend(self, layer: AttentionLayer) -> None:
        self.breaks.append(lambda attend_rows, recur, num_tokens: attend_rows(layer))

    def recur(self, layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
        """The output of a recurrence. It is 0 for padding, so that no padding becomes NaN."""
        out = new_output(inputs).zero_()
        fields = inputs._asdict()
        tensors = {name: weak_alias(x) for name, x in fields.items() if isinstance(x, torch.Tensor)}
        kept: Recurrence = type(inputs)(**fields | tensors)
        target = weak_alias(out)

        def launch(attend_rows: AttendRows, recur: Recur, num_tokens: int) -> None:
            rows = slice(num_tokens)
            target[rows].copy_(recur(layer, tokens_of(kept, rows)))

        self.breaks.append(launch)
        return out


@dataclass(eq=False)
class MixedGraphs:
    """Graphs of up to as many tokens as `buffers` has."""

    step_attention: StepAttention | None  # None: piecewise
    bind_attention: BindAttention  # for piecewise graphs
    # (number of decodes, prefills) -> recurrences, for piecewise graphs; None: no recurrent layers
    bind_states: Callable[[int, PrefillRows], Recur] | None
    write_changes: Callable[[], object]  # applies a step's slot changes, before decodes read slots
    # (number of rows, the step's tokens) -> its decode rows; also fills their tokens
    read_decodes: Callable[[int, TokenBuffers], DecodeRows]
    most_decodes: int  # in a step
    buffers: TokenBuffers
    forward: Forward
    pool: GraphPool
    adapters: Sequence[bool] = (False,)  # which steps are captured: without adapters, with

    def __post_init__(self) -> None:
        if self.step_attention is not None:
            self.most_decodes = min(self.most_decodes, self.step_attention.max_decodes)
        # Both kinds share piecewise graphs.
        self._graphs: dict[tuple[StepKind, bool], SizedGraphs[Captured]] = {}
        for adapters in self.adapters:
            shared: SizedGraphs[Captured] = SizedGraphs()
            for kind in KINDS:
                own = SizedGraphs[Captured]() if self.is_full else shared
                self._graphs[kind, adapters] = own

    @property
    def is_full(self) -> bool:
        """Whether a replay runs the whole step, including its slot changes."""
        return self.step_attention is not None

    def fitting(self, num_decodes: int, prefills: PrefillRows, adapters: bool) -> StepShape | None:
        """The captured shape that a step is padded to; None: there is none."""
        if not self.takes(num_decodes, len(prefills.kv_lens), int(prefills.page_indptr[-1])):
            return None
        kind = StepKind.of(num_decodes, prefills.num_tokens)
        shape = StepShape(kind, num_decodes + prefills.num_tokens, adapters)
        size = self.fitting_size(shape)
        return None if size is None else shape._replace(size=size)

    def takes(self, num_decodes: int, num_prefills: int, num_pages: int) -> bool:
        """Whether the attention of a graph does so many rows, whatever tokens they have."""
        attention = self.step_attention
        return attention is None or (
            num_decodes <= self.most_decodes
            and num_prefills <= attention.max_prefills
            and num_pages <= attention.max_pages
        )

    def fitting_size(self, shape: StepShape) -> int | None:
        """The size of the least graph that holds a step of this shape."""
        return self._graphs[shape.kind, shape.adapters].fitting(shape.size)

    def capture(self, size: int) -> None:
        """Capture steps of `size` tokens on the current stream, between two steps; largest first
        saves memory."""
        for (kind, adapters), graphs in self._graphs.items():
            if size not in graphs:
                step = partial(self._run, kind, adapters, self.buffers.first(size))
                pieces, captured = self.pool.record_pieces(step)
                captured.graphs = pieces
                graphs.add(size, captured)

    def replay(self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows) -> None:
        """Run the step that is in the static inputs. decode_positions: int32 [decodes]."""
        captured = self._graphs[shape.kind, shape.adapters][shape.size]
        *before, last = captured.graphs
        num_decodes = len(decode_positions)
        if self.step_attention is not None:
            self.step_attention.prepare(num_decodes, prefills)
        else:
            tokens, num_tokens = self.buffers.first(shape.size), num_decodes + prefills.num_tokens
            attend_rows = self.bind_attention(tokens, decode_positions, prefills)
            recur: Recur = no_recurrence
            if self.bind_states is not None:
                recur = self.bind_states(num_decodes, prefills)
            for piece, launch in zip(before, captured.breaks, strict=True):
                piece.replay()
                launch(attend_rows, recur, num_tokens)
        last.replay()

    def _run(
        self, kind: StepKind, adapters: bool, tokens: TokenBuffers, cut: Callable[[], None]
    ) -> Captured:
        attention, captured, decodes = self.step_attention, Captured(), None
        if attention is None:

            def attend(layer: AttentionLayer) -> None:
                captured.attend(layer)
                cut()

            def recur(layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
                out = captured.recur(layer, inputs)
                cut()
                return out

            self.forward(tokens, attend, adapters, recur)
            return captured
        self.write_changes()
        if kind is StepKind.MIXED:
            decodes = self.read_decodes(min(len(tokens.q), self.most_decodes), tokens)
        attend_rows = attention.bind(decodes, tokens.q, tokens.out)
        self.forward(tokens, attend_rows, adapters, no_recurrence)
        return captured
