"""A fresh prompt's attention against paged attention over the same pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.attention.fresh_prompt import FreshPrompt
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention

BLOCK_SIZE = 4
PAGES = [5, 2, 7]
LAYERS = [AttentionLayer(i, 6, 2, 16, 0.3) for i in range(2)]


@pytest.mark.parametrize("num_tokens", [1, 4, 11])
@pytest.mark.parametrize("padding", [0, 3])
def test_it_is_what_paged_attention_gives(num_tokens: int, padding: int) -> None:
    torch.manual_seed(0)
    cache = KVCache(
        num_layers=2, num_pages=8, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=16,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    for layer in cache.layers:
        layer.normal_()
    pages = PAGES[: -(-num_tokens // BLOCK_SIZE)]
    slots = [pages[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(num_tokens)]
    prompt = FreshPrompt(cache, torch.tensor(slots + [0] * padding))
    q = torch.randn(num_tokens + padding, 6, 16)
    rows = PrefillRows(
        *(np.array(a, np.int32) for a in ([0, num_tokens], [num_tokens], [0, len(pages)], pages))
    )
    assert rows.is_fresh
    for layer in LAYERS:
        expected = torch.empty_like(q[:num_tokens])
        TorchAttention(cache).mixed(None, rows, q[:num_tokens], expected)(layer)
        out = prompt.attend(layer, q)
        torch.testing.assert_close(out[:num_tokens], expected.flatten(1))
        assert out.isfinite().all(), "padding too: the next layer computes with it"


def test_a_prompt_is_fresh_if_it_is_alone_and_none_of_it_is_cached() -> None:
    def rows(query_indptr: list[int], kv_lens: list[int]) -> PrefillRows:
        none = np.array([], np.int32)
        return PrefillRows(np.array(query_indptr), np.array(kv_lens), none, none)

    assert rows([0, 5], [5]).is_fresh
    assert not rows([0, 5], [9]).is_fresh
    assert not rows([0, 5, 7], [5, 2]).is_fresh
