"""CUDA graphs of mixed steps, by the number of tokens: full, or piecewise.

If attention reads a step's rows on the device (`StepAttention`), a full graph holds the whole step,
which is then a single launch; 28 layers in pieces would cost the host some 3 ms. Each size is
captured twice: for prefills only, and for decodes followed by prefills.

Otherwise graphs are piecewise: a size has num_layers + 1 graphs, and a replay launches attention
between them, with rows and pages from the host:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden

All sizes read and write the same buffers; tokens after the step's are padding. With LoRA enabled,
both kinds are captured again for steps with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows, StepAttention
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import BindAttention, Forward, TokenBuffers
from asyncllm.step_plan import StepKind, StepShape

KINDS = (StepKind.MIXED, StepKind.PREFILL)


@dataclass(eq=False)
class MixedGraphs:
    """Graphs of up to as many tokens as `buffers` has."""

    layers: Sequence[AttentionLayer]
    step_attention: StepAttention | None  # None: piecewise
    bind_attention: BindAttention  # for piecewise graphs
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
        # The graphs of a size, in the order of replay. Both kinds share piecewise graphs.
        self._graphs: dict[tuple[StepKind, bool], SizedGraphs[list[Graph]]] = {}
        for adapters in self.adapters:
            shared: SizedGraphs[list[Graph]] = SizedGraphs()
            for kind in KINDS:
                own = SizedGraphs[list[Graph]]() if self.is_full else shared
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
                graphs.add(size, self.pool.record_pieces(step)[0])

    def replay(self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows) -> None:
        """Run the step that is in the static inputs. decode_positions: int32 [decodes]."""
        *before_attention, last = self._graphs[shape.kind, shape.adapters][shape.size]
        if self.step_attention is not None:
            self.step_attention.prepare(len(decode_positions), prefills)
        else:
            tokens = self.buffers.first(shape.size)
            attend_rows = self.bind_attention(tokens, decode_positions, prefills)
            for piece, layer in zip(before_attention, self.layers, strict=True):
                piece.replay()
                attend_rows(layer)
        last.replay()

    def _run(
        self, kind: StepKind, adapters: bool, tokens: TokenBuffers, cut: Callable[[], None]
    ) -> None:
        attention, decodes = self.step_attention, None
        if attention is None:
            self.forward(tokens, lambda layer: cut(), adapters)
            return
        self.write_changes()
        if kind is StepKind.MIXED:
            decodes = self.read_decodes(min(len(tokens.q), self.most_decodes), tokens)
        self.forward(tokens, attention.bind(decodes, tokens.q, tokens.out), adapters)
