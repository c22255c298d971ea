"""Captured mixed steps where attention cannot be: all but that, by the number of tokens.

A model calls `attend` once per layer, and there the graph breaks: a size is num_layers + 1 small
graphs, and a replay launches each layer's attention between them, over rows and pages that no
capture knows. All sizes read and write the same buffers, tokens beyond the step's are padding:

    piece 0: embed norm qkv write     -> q     attention 0: q -> out
    piece 1: o_proj norm mlp norm qkv write -> q     attention 1: q -> out
    piece 2: o_proj norm mlp norm -> hidden

A short prompt alone, none of it cached, is what a waiting user asks most: its attention needs no
plan (fresh_prompt.py), so those sizes have a second capture, attention and all, in one launch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from asyncllm.attention.base import (
    AttendRows,
    AttentionBackend,
    AttentionLayer,
    PrefillRows,
    Rotation,
)
from asyncllm.attention.fresh_prompt import FreshPrompt
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.captured_sizes import CapturedSizes
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.graphs.step_graph import Clear, ReadDecodes, StepGraph, Way, WriteChanges
from asyncllm.graphs.token_buffers import TokenBuffers, forward, forward_with
from asyncllm.models.base import CausalLM

MOST_WHOLE_TOKENS = 512  # above, launching is quicker than the device, and paged kernels than dense


def forward_fresh(
    model: CausalLM, attention: AttentionBackend, tokens: TokenBuffers, cache: KVCache
) -> torch.Tensor:
    """Hidden states [T, hidden_size] of one prompt from its beginning, padding behind it."""
    prompt = FreshPrompt(cache, tokens.write_slots)

    def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        attention.write(layer, qkv, rotation, tokens.write_slots, tokens.q)
        return prompt.attend(layer, tokens.q)

    return forward_with(model, tokens, attend)


class PrefillGraphs:
    """Steps of up to as many tokens as `buffers` has are captured by calls of `capture`."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        cache: KVCache,
        write_changes: WriteChanges,
        read_decodes: ReadDecodes,
        buffers: TokenBuffers,
        hidden: torch.Tensor,
        clear: Clear,
        pool: GraphPool,
    ) -> None:
        """hidden: for the last replay's hidden states, [most tokens or more, hidden_size]."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._layers = model.attention_layers
        self._write_changes = write_changes
        self._read_decodes = read_decodes
        self._buffers = buffers
        self._clear = clear
        self._pool = pool
        self._hidden = hidden
        self._sizes = CapturedSizes()
        self._pieces: dict[int, list[Graph]] = {}
        self._whole: dict[int, Graph] = {}
        windows = [layer.window for layer in self._layers if layer.window is not None]
        self._most_whole = min([MOST_WHOLE_TOKENS, *windows])  # within a window all is seen
        if cache.block_size == 1:
            self._most_whole = 0  # the padding page has no second position (fresh_prompt.py)

    def graph_of(self, num_decodes: int, prefills: PrefillRows) -> StepGraph | None:
        """What such a step replays; None: it has no graph."""
        size = self._sizes.fitting(num_decodes + prefills.num_tokens)
        if size is None:
            return None
        is_whole = num_decodes == 0 and prefills.is_fresh and size in self._whole
        return StepGraph(size, Way.FRESH if is_whole else Way.PIECES)

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
        if size <= self._most_whole:
            self._whole[size], _ = self._pool.record(partial(self._forward_fresh, tokens))
        self._sizes.add(size)

    def _forward_fresh(self, tokens: TokenBuffers) -> tuple[()]:
        self._write_changes()
        hidden = forward_fresh(self._model, self._attention, tokens, self._cache)
        self._hidden[: len(hidden)].copy_(hidden)
        return ()

    def replay(
        self, graph: StepGraph, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> torch.Tensor:
        """As `StepGraphs` says."""
        size = graph.num_tokens
        if graph.way is Way.FRESH:
            self._whole[size].replay()
        else:
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
