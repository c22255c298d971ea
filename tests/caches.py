"""KV caches for tests: layers that are alike, or any layers."""

from __future__ import annotations

import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.host_pages import HostPages
from asyncllm.attention.kv_cache import KVCache


def uniform_cache(
    *,
    num_layers: int,
    num_pages: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_host_pages: int = 0,
) -> KVCache:
    """One group of layers that see all tokens."""
    layers = [
        AttentionLayer(index, num_kv_heads, num_kv_heads, head_dim, 1.0)
        for index in range(num_layers)
    ]
    layout = CacheLayout(layers, block_size, dtype)
    host_pages = HostPages(layout.host_shape(num_host_pages), torch.int64, device)
    return KVCache(layout, num_pages, device, host_pages)
