"""The memory of KV pages as a configuration asks for it, on the device and on the host."""

from __future__ import annotations

import torch

from asyncllm.attention.host_pages import HostPages
from asyncllm.attention.kv_cache import KVCache
from asyncllm.config import EngineConfig


def kv_page_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of one page, over all layers."""
    model = config.model
    return KVCache.page_bytes(
        model.num_layers, config.block_size, model.num_kv_heads, model.head_dim, dtype
    )


def begin_host_pages(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> HostPages:
    """As many as `swap_space` holds; being allocated from here on."""
    model = config.model
    num_pages = config.swap_space_bytes // kv_page_bytes(config, dtype)
    shape = KVCache.host_shape(
        num_pages, model.num_layers, config.block_size, model.num_kv_heads, model.head_dim
    )
    return HostPages(shape, dtype, device)


def allocate_cache(
    config: EngineConfig,
    num_pages: int,
    host_pages: HostPages,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """The KV cache: `num_pages` and the padding page. Raises `ValueError` naming the flags where
    the memory is not there."""
    model = config.model
    try:
        return KVCache(
            num_layers=model.num_layers,
            num_pages=num_pages + 1,
            block_size=config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
            host_pages=host_pages,
        )
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"no memory for {num_pages} KV pages: lower num_gpu_blocks_override, "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error
