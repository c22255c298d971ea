"""Captured mixed steps: everything but attention, by the number of tokens.

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

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch

from asyncllm.attention.base import (
    Attend,
    AttendRows,
    AttentionBackend,
    AttentionLayer,
    Rotation,
)
from asyncllm.attention.fresh_prompt import FreshPrompt
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.models.base import CausalLM

MOST_WHOLE_TOKENS = 512  # above, launching is quicker than the device, and paged kernels than dense


@dataclass(frozen=True, slots=True)
class TokenBuffers:
    """A mixed step's tokens on the device. T tokens; all attention layers have one shape."""

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    prompt_lens: torch.Tensor  # int32 [T]
    write_slots: torch.Tensor  # int64 [T], 0 is in the padding page
    q: torch.Tensor  # [T, num_heads, head_dim]
    out: torch.Tensor  # the same: attention's output

    @classmethod
    def zeros(
        cls, num_tokens: int, layer: AttentionLayer, dtype: torch.dtype, device: torch.device
    ) -> TokenBuffers:
        """Zeros: valid inputs, and attention outputs that no row can take harm from."""
        token_ids, positions, prompt_lens = torch.zeros(
            3, num_tokens, dtype=torch.int32, device=device
        ).unbind()
        heads = (num_tokens, layer.num_heads, layer.head_dim)
        return cls(
            token_ids=token_ids,
            positions=positions,
            prompt_lens=prompt_lens,
            write_slots=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            q=torch.zeros(heads, dtype=dtype, device=device),
            out=torch.zeros(heads, dtype=dtype, device=device),
        )

    def first(self, num_tokens: int) -> TokenBuffers:
        return TokenBuffers(
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.prompt_lens[:num_tokens],
            self.write_slots[:num_tokens],
            self.q[:num_tokens],
            self.out[:num_tokens],
        )


def forward(
    model: CausalLM, attention: AttentionBackend, tokens: TokenBuffers, attend_rows: AttendRows
) -> torch.Tensor:
    """Hidden states [T, hidden_size]; `attend_rows` is called with each layer, after its write."""
    out = tokens.out.flatten(1)

    def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        attention.write(layer, qkv, rotation, tokens.write_slots, tokens.q)
        attend_rows(layer)
        return out

    return _forward(model, tokens, attend)


def forward_fresh(
    model: CausalLM, attention: AttentionBackend, tokens: TokenBuffers, cache: KVCache
) -> torch.Tensor:
    """Hidden states [T, hidden_size] of one prompt from its beginning, padding behind it."""
    prompt = FreshPrompt(cache, tokens.write_slots)

    def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        attention.write(layer, qkv, rotation, tokens.write_slots, tokens.q)
        return prompt.attend(layer, tokens.q)

    return _forward(model, tokens, attend)


def _forward(model: CausalLM, tokens: TokenBuffers, attend: Attend) -> torch.Tensor:
    prompt_lens = tokens.prompt_lens if model.uses_prompt_lens else None
    return model.forward(tokens.token_ids, tokens.positions, prompt_lens, attend)


class PrefillGraphs:
    """Steps of up to `max_size` tokens are captured by calls of `capture`."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        cache: KVCache,
        max_size: int,
        pool: GraphPool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._cache = cache
        self._layers = model.attention_layers
        self._pool = pool
        self._buffers = TokenBuffers.zeros(max_size, self._layers[0], dtype, device)
        self._hidden: torch.Tensor | None = None  # [max_size, hidden_size], of the last replay
        self._sizes: list[int] = []  # captured, ascending
        self._pieces: dict[int, list[Graph]] = {}
        self._whole: dict[int, Graph] = {}
        windows = [layer.window for layer in self._layers if layer.window is not None]
        self._most_whole = min([MOST_WHOLE_TOKENS, *windows])  # within a window all is seen

    def __len__(self) -> int:
        return len(self._pieces)

    def size_for(self, num_tokens: int) -> int | None:
        """The smallest captured size for so many tokens; None where none is as large."""
        place = bisect_left(self._sizes, num_tokens)
        return self._sizes[place] if place < len(self._sizes) else None

    def buffers(self, size: int) -> TokenBuffers:
        """What a replay of `size` reads; to be filled on the stream of the replay."""
        return self._buffers.first(size)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream, between two steps; largest first saves memory."""
        tokens = self.buffers(size)
        tokens.write_slots.zero_()
        # Lazily made workspaces and compiled kernels must exist before capture.
        hidden = forward(self._model, self._attention, tokens, _no_attention)
        if self._hidden is None:
            self._hidden = hidden.new_zeros((len(self._buffers.token_ids), hidden.shape[1]))
        with self._pool.capture() as capture:
            hidden = forward(self._model, self._attention, tokens, lambda layer: capture.cut())
            self._hidden[:size].copy_(hidden)
        self._pieces[size] = capture.graphs
        if size <= self._most_whole:
            self._whole[size] = self._capture_whole(size)
        insort(self._sizes, size)

    def _capture_whole(self, size: int) -> Graph:
        tokens = self.buffers(size)
        forward_fresh(self._model, self._attention, tokens, self._cache)
        assert self._hidden is not None
        with self._pool.capture() as capture:
            hidden = forward_fresh(self._model, self._attention, tokens, self._cache)
            self._hidden[:size].copy_(hidden)
        (graph,) = capture.graphs
        return graph

    def has_whole(self, size: int) -> bool:
        return size in self._whole

    def replay_whole(self, size: int) -> torch.Tensor:
        """`replay` of a step that is one prompt, none of it computed before."""
        self._whole[size].replay()
        assert self._hidden is not None
        return self._hidden[:size]

    def replay(self, size: int, attend_rows: AttendRows) -> torch.Tensor:
        """Run the step in `buffers(size)`: hidden states [size, hidden_size], until the next."""
        *before_attention, last = self._pieces[size]
        for piece, layer in zip(before_attention, self._layers, strict=True):
            piece.replay()
            attend_rows(layer)
        last.replay()
        assert self._hidden is not None
        return self._hidden[:size]


def _no_attention(layer: AttentionLayer) -> None:
    """Attention writes `out` alone, which kernels and shapes do not depend on."""
