"""Piecewise CUDA graphs of mixed steps: all but attention is captured, by the number of tokens.

A model calls `attend` once per layer, and there the graph breaks: a size is num_layers + 1 small
graphs, and a replay launches each layer's attention between them, over rows and pages that no
capture knows. All sizes read and write the same buffers, tokens beyond the step's are padding:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncllm.attention.base import AttendRows, AttentionBackend, AttentionLayer, PrefillRows
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import Clear, ReadDecodes, TokenBuffers, forward
from asyncllm.models.base import CausalLM
from asyncllm.step_plan import StepKind, StepShape


class PiecewiseGraphs:
    """A `MixedGraphs`, for steps of up to as many tokens as `buffers` has."""

    writes_changes = False

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        read_decodes: ReadDecodes,
        buffers: TokenBuffers,
        hidden: torch.Tensor,
        clear: Clear,
        pool: GraphPool,
    ) -> None:
        """hidden: for the last replay's hidden states, [most tokens or more, hidden_size]."""
        self._model = model
        self._attention = attention
        self._layers = model.attention_layers
        self._read_decodes = read_decodes
        self._buffers = buffers
        self._clear = clear
        self._pool = pool
        self._hidden = hidden
        self._pieces: SizedGraphs[list[Graph]] = SizedGraphs()

    def fitting(self, num_decodes: int, prefills: PrefillRows) -> StepShape | None:
        size = self._pieces.fitting(num_decodes + prefills.num_tokens)
        kind = StepKind.of(num_decodes, prefills.num_tokens)
        return None if size is None else StepShape(kind, size)

    def capture(self, size: int) -> None:
        self._clear()
        tokens = self._buffers.first(size)
        # Lazily made workspaces and compiled kernels must exist before capture.
        forward(self._model, self._attention, tokens, _no_attention)
        with self._pool.capture() as capture:
            hidden = forward(self._model, self._attention, tokens, lambda layer: capture.cut())
            self._hidden[:size].copy_(hidden)
        self._pieces.add(size, capture.graphs)

    def replay(
        self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> torch.Tensor:
        tokens, decodes = self._buffers.first(shape.size), None
        if num_decodes := len(decode_positions):
            max_len = int(decode_positions.max()) + 1
            decodes = replace(self._read_decodes(num_decodes, tokens), max_len=max_len)
        attend_rows = self._attention.mixed(decodes, prefills, tokens.q, tokens.out)
        self._replay_pieces(shape.size, attend_rows)
        return self._hidden

    def _replay_pieces(self, size: int, attend_rows: AttendRows) -> None:
        *before_attention, last = self._pieces[size]
        for piece, layer in zip(before_attention, self._layers, strict=True):
            piece.replay()
            attend_rows(layer)
        last.replay()


def _no_attention(layer: AttentionLayer) -> None:
    """Attention writes `out` alone, which kernels and shapes do not depend on."""
