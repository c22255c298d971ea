"""Captured mixed steps where attention cannot be: all but that, by the number of tokens.

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
from asyncllm.graphs.captured_sizes import CapturedSizes
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.graphs.step_graph import Clear, ReadDecodes, StepGraph, Way
from asyncllm.graphs.token_buffers import TokenBuffers, forward
from asyncllm.models.base import CausalLM


class PrefillGraphs:
    """Steps of up to as many tokens as `buffers` has are captured by calls of `capture`."""

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
        self._sizes = CapturedSizes()
        self._pieces: dict[int, list[Graph]] = {}

    def graph_of(self, num_decodes: int, prefills: PrefillRows) -> StepGraph | None:
        """What such a step replays; None: it has no graph."""
        size = self._sizes.fitting(num_decodes + prefills.num_tokens)
        return None if size is None else StepGraph(size, Way.PIECES)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream, between two steps; largest first saves memory."""
        tokens = self._buffers.first(size)
        self._clear()
        # Lazily made workspaces and compiled kernels must exist before capture.
        forward(self._model, self._attention, tokens, _no_attention)
        with self._pool.capture() as capture:
            hidden = forward(self._model, self._attention, tokens, lambda layer: capture.cut())
            self._hidden[:size].copy_(hidden)
        self._pieces[size] = capture.graphs
        self._sizes.add(size)

    def replay(
        self, graph: StepGraph, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> torch.Tensor:
        """As `StepGraphs` says."""
        size = graph.num_tokens
        tokens, decodes = self._buffers.first(size), None
        if num_decodes := len(decode_positions):
            max_len = int(decode_positions.max()) + 1
            decodes = replace(self._read_decodes(num_decodes, tokens), max_len=max_len)
        attend_rows = self._attention.mixed(decodes, prefills, tokens.q, tokens.out)
        self._replay_pieces(size, attend_rows)
        return self._hidden

    def _replay_pieces(self, size: int, attend_rows: AttendRows) -> None:
        *before_attention, last = self._pieces[size]
        for piece, layer in zip(before_attention, self._layers, strict=True):
            piece.replay()
            attend_rows(layer)
        last.replay()


def _no_attention(layer: AttentionLayer) -> None:
    """Attention writes `out` alone, which kernels and shapes do not depend on."""
