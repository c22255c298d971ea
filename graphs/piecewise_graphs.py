"""Piecewise CUDA graphs of mixed steps: all but attention is captured, by the number of tokens.

A model calls `attend` once per layer, and there the graph breaks: a size is num_layers + 1 small
graphs, and a replay launches each layer's attention between them, over rows and pages that no
capture knows. All sizes read and write the same buffers, tokens beyond the step's are padding:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import BindAttention, Forward, TokenBuffers
from asyncllm.step_plan import StepKind, StepShape


@dataclass(eq=False)
class PiecewiseGraphs:
    """For steps of up to as many tokens as `buffers` has. Has the methods of `FullGraphs`."""

    layers: Sequence[AttentionLayer]
    bind_attention: BindAttention
    buffers: TokenBuffers
    forward: Forward
    pool: GraphPool
    writes_changes = False

    def __post_init__(self) -> None:
        self._pieces: SizedGraphs[list[Graph]] = SizedGraphs()

    def fitting(self, num_decodes: int, prefills: PrefillRows) -> StepShape | None:
        size = self._pieces.fitting(num_decodes + prefills.num_tokens)
        kind = StepKind.of(num_decodes, prefills.num_tokens)
        return None if size is None else StepShape(kind, size)

    def capture(self, size: int) -> None:
        tokens = self.buffers.first(size)
        pieces, _ = self.pool.record_pieces(lambda cut: self.forward(tokens, lambda layer: cut()))
        self._pieces.add(size, pieces)

    def replay(self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows) -> None:
        tokens = self.buffers.first(shape.size)
        attend_rows = self.bind_attention(tokens, decode_positions, prefills)
        *before_attention, last = self._pieces[shape.size]
        for piece, layer in zip(before_attention, self.layers, strict=True):
            piece.replay()
            attend_rows(layer)
        last.replay()
