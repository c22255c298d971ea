"""A fresh prompt's attention, captured, against paged attention in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, PrefillRows
from asyncllm.attention.fresh_prompt import FreshPrompt
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK_SIZE = 16
SIZE = 512
PAGES = SIZE // BLOCK_SIZE


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_captured_equals_paged(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(0, 16, 4, head_dim, head_dim**-0.5)
    cache = KVCache(
        num_layers=1, num_pages=PAGES + 1, block_size=BLOCK_SIZE, num_kv_heads=4,
        head_dim=head_dim, dtype=dtype, device=torch.device("cuda"),
    )  # fmt: skip
    cache.layers[0][1:].normal_()
    cache.layers[0][0, :, 0] = torch.nan  # what padding writes
    q = torch.randn(SIZE, 16, head_dim, device="cuda", dtype=dtype)
    write_slots = torch.zeros(SIZE, dtype=torch.int64, device="cuda")
    pages = 1 + torch.randperm(PAGES)
    slots = (pages[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        FreshPrompt(cache, write_slots).attend(layer, q)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = FreshPrompt(cache, write_slots).attend(layer, q)
        for num_tokens in (1, 15, 16, 17, 333, 511, 512):
            write_slots.zero_()
            write_slots[:num_tokens].copy_(slots[:num_tokens])
            graph.replay()
            num_pages = -(-num_tokens // BLOCK_SIZE)
            rows = PrefillRows(
                np.array([0, num_tokens], np.int32),
                np.array([num_tokens], np.int32),
                np.array([0, num_pages], np.int32),
                pages[:num_pages].numpy().astype(np.int32),
            )
            expected = torch.empty_like(q[:num_tokens])
            TorchAttention(cache).mixed(None, rows, q[:num_tokens], expected)(layer)
            torch.testing.assert_close(
                out[:num_tokens].float(), expected.flatten(1).float(), atol=0.02, rtol=0.02
            )
            assert out.isfinite().all()


def test_a_flash_kernel_does_it() -> None:
    """Not torch's fallback in plain products, which nothing would tell."""
    layer = AttentionLayer(0, 16, 8, 128, 128**-0.5)
    cache = KVCache(
        num_layers=1, num_pages=PAGES + 1, block_size=BLOCK_SIZE, num_kv_heads=8, head_dim=128,
        dtype=torch.bfloat16, device=torch.device("cuda"),
    )  # fmt: skip
    prompt = FreshPrompt(cache, torch.arange(16, 16 + 128, device="cuda"))
    q = torch.randn(128, 16, 128, device="cuda", dtype=torch.bfloat16)
    prompt.attend(layer, q)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prompt.attend(layer, q)
        torch.cuda.synchronize()
    assert any("flash" in event.name for event in profile.events()), profile.events()
