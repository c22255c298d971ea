"""Page moves of the KV cache: copies, swaps in chunks, and what they must not touch."""

from __future__ import annotations

import pytest
import torch

from asyncllm.attention.kv_cache import SWAP_CHUNK_PAGES, KVCache
from tests.caches import uniform_cache


def make_cache(num_pages: int = 80, num_host_pages: int = 80) -> KVCache:
    cache = uniform_cache(
        num_layers=3,
        num_pages=num_pages,
        block_size=2,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_host_pages=num_host_pages,
    )
    for index, layer in enumerate(cache.layers):
        numbers = torch.arange(num_pages).view(-1, 1, 1, 1, 1) * 10.0 + index
        layer.copy_(numbers.expand_as(layer))
    return cache


def content(cache: KVCache, page: int) -> list[float]:
    """The content of one page in each layer."""
    return [layer[page].unique().item() for layer in cache.layers]


@pytest.mark.parametrize("count", [1, 5, SWAP_CHUNK_PAGES, SWAP_CHUNK_PAGES + 7])
def test_swapped_out_and_in_elsewhere(count: int) -> None:
    cache = make_cache()
    host = [(7 * i + 3) % 80 for i in range(count)]
    cache.swap_out([(i + 1, host[i]) for i in range(count)])
    for layer in cache.layers:
        layer.zero_()
    cache.swap_in([(host[i], 79 - i) for i in range(count)])
    for i in range(count):
        assert content(cache, 79 - i) == [(i + 1) * 10.0 + layer for layer in range(3)]
    assert content(cache, 0) == [0.0, 0.0, 0.0]


def test_copies_read_before_they_write() -> None:
    cache = make_cache()
    cache.copy_pages([(1, 2), (2, 3)])
    assert content(cache, 2) == [10.0, 11.0, 12.0]
    assert content(cache, 3) == [20.0, 21.0, 22.0]  # the old content of 2


def test_write_goes_to_flat_positions() -> None:
    cache = make_cache(4)
    k, v = torch.full((2, 2, 4), 7.0), torch.full((2, 2, 4), 8.0)
    cache.write(1, torch.tensor([3, 6]), k, v)  # page 1 offset 1, page 3 offset 0
    assert cache.layers[1][1, 0, 1].unique().item() == 7.0
    assert cache.layers[1][3, 1, 0].unique().item() == 8.0
    assert cache.layers[1][1, 0, 0].unique().item() == 11.0
    assert cache.layers[0][1].unique().item() == 10.0
