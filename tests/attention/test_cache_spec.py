"""Layers share storages as their specs and numbers allow, and no page is another layer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache

FULL = AttentionLayer(0, 8, 4, 16, 0.25)
CPU = torch.device("cpu")


def layers(pattern: str, **changes: object) -> list[AttentionLayer]:
    """w: a window of 8, v: one of 12, f: all tokens."""
    windows = {"w": 8, "v": 12, "f": None}
    return [replace(FULL, index=i, window=windows[kind]) for i, kind in enumerate(pattern)]


@pytest.mark.parametrize(
    ("pattern", "windows", "num_storages"),
    [
        ("ffff", [None], 4),  # today's layout: a storage for each layer
        ("wwww", [8], 4),
        ("wf" * 12, [8, None], 12),  # gpt-oss 20B
        ("wwwf" * 10, [8, 8, 8, None], 10),  # Cohere 2
        ("wwwwwf" * 5 + "wwww", [8] * 6 + [None], 5),  # Gemma 3 4B: one place of 35 is empty
        ("wvf", [8, 12, None], 1),
        (
            "f" + "w" * 39,
            [None] + [8] * 7,
            6,
        ),  # the full layer's bundle is as small as 8 groups allow
    ],
)
def test_bundles(pattern: str, windows: list[int | None], num_storages: int) -> None:
    layout = CacheLayout(layers(pattern), 16, torch.bfloat16)
    assert sorted(layout.windows, key=str) == sorted(windows, key=str)
    assert layout.num_storages == num_storages
    assert layout.page_bytes == num_storages * 2 * 16 * 4 * 16 * 2
    places = set(zip(layout.group_of, layout.storage_of, strict=True))
    assert len(places) == len(pattern), "no two layers have one place"
    for index, kind in enumerate(pattern):
        assert layout.windows[layout.group_of[index]] == {"w": 8, "v": 12, "f": None}[kind]


def test_a_layer_writes_nothing_but_its_own_pages() -> None:
    """Pages of group 1 hold its layers, whatever those of group 0 are called."""
    layout = CacheLayout(layers("wfwf"), 2, torch.float32)
    cache = KVCache(layout, 3, CPU)
    for index, layer in enumerate(cache.layers):
        assert layer.shape == (3, 2, 2, 4, 16) and layer.is_contiguous()
        layer[1 + layout.group_of[index]] = index + 1.0
    for index, layer in enumerate(cache.layers):
        assert (layer[1 + layout.group_of[index]] == index + 1.0).all()
        assert (layer[0] == 0).all()
    assert len(cache.storages) == 2
    assert cache.layers[0].data_ptr() == cache.layers[1].data_ptr()


def test_a_smaller_layers_page_is_padded() -> None:
    wide, narrow = FULL, replace(FULL, index=1, head_dim=4)
    cache = KVCache(CacheLayout([wide, narrow], 2, torch.float32), 3, CPU)
    assert cache.layers[1].shape == (3, 2, 2, 4, 4)
    cache.layers[1].fill_(7.0)
    assert (cache.storages[0][:, -1] == 0).all(), "its padding is nobody's"
    assert cache.layers[1].stride(0) == cache.layers[0].stride(0)
