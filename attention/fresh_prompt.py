"""Attention of one prompt that begins in its step: dense and causal, and so a graph can hold it.

Paged prefill attention is planned on the host for each step's rows and pages. Here the rows are the
step's tokens and nothing else: each token sees those before it, and padding, which is behind them,
is seen by nobody. Keys and values are read back from the pages that `write` has just filled, by one
gather: the projection's own output need not survive `write`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.kv_cache import KVCache

# Not cuDNN's, which builds a plan for each shape.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class FreshPrompt:
    """T tokens in the order of their positions, from 0 on. Only enqueues; capturable."""

    def __init__(self, cache: KVCache, write_slots: torch.Tensor) -> None:
        """write_slots: int64 [T], flat KV positions page * block_size + offset."""
        # [pages, 2, block, ...] as rows: a page's keys, then its values.
        self._layers = [layer.flatten(0, 2) for layer in cache.layers]
        keys = write_slots + write_slots // cache.block_size * cache.block_size
        self._rows = torch.cat([keys, keys + cache.block_size])  # int64 [2 * T]

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """q [T, num_heads, head_dim], rotated: [T, num_heads * head_dim]. No window."""
        rows = self._layers[layer.index].index_select(0, self._rows)  # [2 * T, kv_heads, dim]
        q, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, *rows.chunk(2)))
        with sdpa_kernel(BACKENDS):
            out = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, scale=layer.scale, enable_gqa=True
            )  # [1, num_heads, T, head_dim]
        return out.squeeze(0).transpose(0, 1).flatten(1)
