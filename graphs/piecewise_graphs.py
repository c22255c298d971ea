"""Piecewise CUDA graphs of mixed steps: all but attention is captured, by the number of tokens.

A model calls `attend` once per layer, and there the graph breaks: a size is num_layers + 1 small
graphs, and a replay launches each layer's attention between them, over rows and pages that no
capture knows. All sizes read and write the same buffers, tokens beyond the step's are padding:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
    adapters: Sequence[bool] = (False,)  # False: for steps that have none; True: that have
    writes_changes = False

    def __post_init__(self) -> None:
        self._pieces: dict[bool, SizedGraphs[list[Graph]]] = {
            adapters: SizedGraphs() for adapters in self.adapters
        }

    def fitting(self, num_decodes: int, prefills: PrefillRows, adapters: bool) -> StepShape | None:
        size = self._pieces[adapters].fitting(num_decodes + prefills.num_tokens)
        kind = StepKind.of(num_decodes, prefills.num_tokens)
        return None if size is None else StepShape(kind, size, adapters)

    def capture(self, size: int) -> None:
        tokens = self.buffers.first(size)
        for adapters, sizes in self._pieces.items():
            step = partial(self._run, tokens, adapters)
            sizes.add(size, self.pool.record_pieces(step)[0])

    def _run(self, tokens: TokenBuffers, adapters: bool, cut: Callable[[], None]) -> object:
        return self.forward(tokens, lambda layer: cut(), adapters)

    def replay(self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows) -> None:
        tokens = self.buffers.first(shape.size)
        attend_rows = self.bind_attention(tokens, decode_positions, prefills)
        *before_attention, last = self._pieces[shape.adapters][shape.size]
        for piece, layer in zip(before_attention, self.layers, strict=True):
            piece.replay()
            attend_rows(layer)
        last.replay()
