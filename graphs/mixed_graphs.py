"""CUDA graphs of mixed steps, by the number of tokens: full, or piecewise.

Where attention reads on the device what differs from step to step (`StepAttention`), a graph holds
all of a step, which is one launch: 28 layers in pieces cost the host some 3 ms. A size is captured
for prefills alone, and with decodes before them.

Else a graph breaks at each layer's attention: a size is num_layers + 1 small graphs, and a replay
launches the attention between them, over rows and pages that no capture knows:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden

All sizes read and write the same buffers; tokens beyond the step's are padding. Both forms are
captured again for steps with adapters, where those are served.
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
    """For steps of up to as many tokens as `buffers` has."""

    layers: Sequence[AttentionLayer]
    step_attention: StepAttention | None  # None: piecewise
    bind_attention: BindAttention  # of pieces
    write_changes: Callable[[], object]  # a step's changes of slots, which its decodes read
    # (rows, the step's tokens) -> rows of the step's decodes, whose tokens are filled with it
    read_decodes: Callable[[int, TokenBuffers], DecodeRows]
    most_decodes: int  # of a step
    buffers: TokenBuffers
    forward: Forward
    pool: GraphPool
    adapters: Sequence[bool] = (False,)  # False: for steps that have none; True: that have

    def __post_init__(self) -> None:
        if self.step_attention is not None:
            self.most_decodes = min(self.most_decodes, self.step_attention.max_decodes)
        # A size's graphs, in the order of their replay. Pieces are the same for both kinds.
        self._graphs: dict[tuple[StepKind, bool], SizedGraphs[list[Graph]]] = {}
        for adapters in self.adapters:
            shared: SizedGraphs[list[Graph]] = SizedGraphs()
            for kind in KINDS:
                own = SizedGraphs[list[Graph]]() if self.is_full else shared
                self._graphs[kind, adapters] = own

    @property
    def is_full(self) -> bool:
        """Whether a replay is the whole step, which begins with its changes of slots."""
        return self.step_attention is not None

    def fitting(self, num_decodes: int, prefills: PrefillRows, adapters: bool) -> StepShape | None:
        """The shape that such a step is padded to; None: it has no graph."""
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
        """Run the step whose tokens are in the static inputs. decode_positions: int32 [decodes]."""
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
