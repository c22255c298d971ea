"""Soft caps, sinks and heads that a model has rotated, on FlashInfer against torch's attention.

Prefills with a soft cap, slopes, or a window are modules of their own, which FlashInfer may compile
here, in a minute each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncllm.attention.base import (
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    RotatedHeads,
    Rotation,
)
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("flashinfer")
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGES = 32, 8, 128, 40
TOLERANCE = 1e-2  # relative: bf16 output, and bf16 softmax weights
CAPS = (None, 5.0)
FEATURES = [(cap, sinks, window) for cap in CAPS for sinks in (0, 1) for window in (None, 100)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF16)


def layer_with(soft_cap: float | None, has_sinks: int, window: int | None) -> AttentionLayer:
    sinks = 2 * random(HEADS) if has_sinks else None
    return AttentionLayer(0, HEADS, KV_HEADS, HEAD_DIM, 0.2, window, None, soft_cap, sinks)


def make_caches(num_pages: int) -> tuple[KVCache, KVCache]:
    """Two of the same contents."""
    caches = [
        uniform_cache(
            num_layers=1, num_pages=num_pages, block_size=16, num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM, dtype=BF16, device=CUDA,
        )
        for _ in range(2)
    ]  # fmt: skip
    caches[0].layers[0].normal_()
    caches[1].layers[0].copy_(caches[0].layers[0])
    return caches[0], caches[1]


def error_of(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.float() - reference.float()).norm() / reference.float().norm()).item()


def rotated_heads(num_tokens: int, dim: int = HEAD_DIM, v_dim: int = HEAD_DIM) -> RotatedHeads:
    """Strided as transformers' models have them."""
    q = random(HEADS, num_tokens, dim).transpose(0, 1)
    return RotatedHeads(q, random(KV_HEADS, num_tokens, dim).transpose(0, 1),
                        random(num_tokens, KV_HEADS, v_dim))  # fmt: skip


@pytest.mark.parametrize(("soft_cap", "sinks", "window"), FEATURES)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_decode(
    soft_cap: float | None, sinks: int, window: int | None, rows: int, is_rotated: bool
) -> None:
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    layer = layer_with(soft_cap, sinks, window)
    ours, reference = make_caches(1 + rows * PAGES)
    tables = (torch.randperm(rows * PAGES, device=CUDA) + 1).view(rows, PAGES).int()
    positions = torch.randint(0, PAGES * 16, (rows,), device=CUDA, dtype=torch.int32)
    decodes = DecodeRows((tables,), positions)
    heads: torch.Tensor | RotatedHeads = rotated_heads(rows)
    rotation = None
    if not is_rotated:
        heads = random(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        angles = torch.rand(PAGES * 16, HEAD_DIM // 2, device=CUDA) * 6
        rotation = Rotation(positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    copy = heads if isinstance(heads, RotatedHeads) else heads.clone()
    expected = TorchAttention(reference).decode(decodes)(layer, copy, rotation)
    out = FlashInferAttention(ours, [layer]).decode(decodes)(layer, heads, rotation)
    assert error_of(out, expected) < TOLERANCE
    assert error_of(ours.layers[0], reference.layers[0]) < TOLERANCE


@pytest.mark.parametrize(("soft_cap", "sinks", "window"), FEATURES)
def test_mixed_step(soft_cap: float | None, sinks: int, window: int | None) -> None:
    """Two decodes, 40 tokens after 300 old ones, 70 new ones."""
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    layer = layer_with(soft_cap, sinks, window)
    cache, _ = make_caches(200)
    pages = torch.randperm(199)[:160].int() + 1
    decodes = DecodeRows(
        (pages[:80].view(2, 40).cuda(),), torch.tensor([600, 17], device=CUDA, dtype=torch.int32)
    )
    prefills = PrefillRows(
        np.array([0, 40, 110], np.int32), np.array([340, 70], np.int32),
        np.array([0, 22, 27], np.int32), pages[None, 80:107].numpy(),
    )  # fmt: skip
    q = random(112, HEADS, HEAD_DIM)
    ours, expected = torch.zeros_like(q), torch.zeros_like(q)
    TorchAttention(cache).mixed(decodes, prefills, q, expected)(layer)
    FlashInferAttention(cache, [layer]).mixed(decodes, prefills, q, ours)(layer)
    assert error_of(ours, expected) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize(("group", "kv_heads", "dim", "v_dim"), [(4, 8, 128, 128), (3, 5, 96, 64)])
def test_rotated_heads_are_written_and_padded(
    num_tokens: int, group: int, kv_heads: int, dim: int, v_dim: int
) -> None:
    from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

    layer = layer_with(None, 0, None)
    ours, reference = make_caches(40)
    heads = RotatedHeads(
        random(group * kv_heads, num_tokens, dim).transpose(0, 1),
        random(kv_heads, num_tokens, dim).transpose(0, 1),
        random(num_tokens, kv_heads, v_dim),
    )
    slots = torch.randperm(39 * 16, device=CUDA)[:num_tokens] + 16
    expected = torch.empty(num_tokens, HEADS, HEAD_DIM, device=CUDA, dtype=BF16)
    TorchAttention(reference).write(layer, heads, None, slots[None], expected)
    q = rotate_and_write(layer, heads, None, ours.layers[0], slots)
    assert torch.equal(q, expected) and torch.equal(ours.layers[0], reference.layers[0])


# Query heads, KV heads, head_dim, window, sinks.
MODELS = {"gemma-3": (8, 4, 256, 100, 0), "gpt-oss": (64, 8, 64, 100, 1)}


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_models(name: str) -> None:
    """Decodes, and two of them beside 40 tokens after 300 old ones and 70 new ones, in a layer with
    a window and one without."""
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    heads, kv_heads, dim, window, has_sinks = MODELS[name]
    sinks = 2 * random(heads) if has_sinks else None
    layer = AttentionLayer(0, heads, kv_heads, dim, dim**-0.5, window, None, None, sinks)
    layers = [layer, replace(layer, index=1, window=None)]
    cache = KVCache(CacheLayout(layers, 16, BF16), 400, CUDA)
    for pages in cache.layers:
        pages[1:].normal_()
    plain, ours = TorchAttention(cache), FlashInferAttention(cache, layers)
    tables = (1 + torch.randperm(399)[:160]).view(2, 2, 40).int()
    prompt_pages = (1 + torch.randperm(399)[:54]).view(2, 27).int()
    positions = torch.tensor([600, 17], device=CUDA, dtype=torch.int32)
    decodes = DecodeRows(tables.cuda().unbind(), positions)
    prefills = PrefillRows(
        np.array([0, 40, 110], np.int32), np.array([340, 70], np.int32),
        np.array([0, 22, 27], np.int32), prompt_pages.numpy(),
    )  # fmt: skip
    q = random(112, heads, dim)
    outs = [torch.zeros_like(q) for _ in range(2)]
    attends = [
        backend.mixed(decodes, prefills, q, out)
        for backend, out in zip((plain, ours), outs, strict=True)
    ]
    for each in layers:
        for attend in attends:
            attend(each)
        assert error_of(outs[1][:2], outs[0][:2]) < TOLERANCE, each
        assert error_of(outs[1][2:], outs[0][2:]) < TOLERANCE, each


# By FA2, whose tiles of split KV need more than 128 MiB of workspace on 132 SMs.
LARGE_SPLITS = {"qwen3-next": (16, 2, 256, None), "groups of 8, a window": (32, 4, 128, 4000)}


@pytest.mark.parametrize("name", LARGE_SPLITS)
def test_a_short_prompt_on_a_long_prefix(name: str) -> None:
    """40 tokens after 4,000 old ones: their KV is split into nearly as many tiles as can be."""
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    heads, kv_heads, dim, window = LARGE_SPLITS[name]
    layer = AttentionLayer(0, heads, kv_heads, dim, dim**-0.5, window)
    cache = KVCache(CacheLayout([layer], 16, BF16), 300, CUDA)
    cache.layers[0][1:].normal_()
    pages = (1 + torch.randperm(299)[:253]).int()
    arrays = (np.array(values, np.int32) for values in ([0, 40], [4040], [0, 253]))
    prefills = PrefillRows(*arrays, pages[None].numpy())
    q = random(40, heads, dim)
    ours, expected = torch.zeros_like(q), torch.zeros_like(q)
    TorchAttention(cache).bind_prefills(prefills, q, expected)(layer)
    FlashInferAttention(cache, [layer]).bind_prefills(prefills, q, ours)(layer)
    assert error_of(ours, expected) < TOLERANCE


def test_groups_of_layers_have_tables_of_their_own() -> None:
    """Full attention beside windows, whose tables have the padding page behind them."""
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    window, positions = 50, torch.tensor([600, 17], device=CUDA, dtype=torch.int32)
    layers = [replace(layer_with(None, 0, w), index=i) for i, w in enumerate((None, window) * 2)]
    layout = CacheLayout(layers, 16, BF16)
    cache = KVCache(layout, 400, CUDA)
    assert layout.num_groups == 2 and len(cache.storages) == 2
    for layer in cache.layers:
        layer[1:].normal_()
    tables = (1 + torch.randperm(399)[:160]).view(2, 2, 40).int()
    prompt_pages = (1 + torch.randperm(399)[:54]).view(2, 27).int()
    for group, seen in enumerate(layout.windows):
        if seen is not None:
            tables[group, 0, : (600 - window + 1) // 16] = 0
            prompt_pages[group, : (300 - window + 1) // 16] = 0
    decodes = DecodeRows(tables.cuda().unbind(), positions)
    prefills = PrefillRows(
        np.array([0, 40, 110], np.int32), np.array([340, 70], np.int32),
        np.array([0, 22, 27], np.int32), prompt_pages.numpy(),
    )  # fmt: skip
    q = random(112, HEADS, HEAD_DIM)
    ours, expected = FlashInferAttention(cache, layers), TorchAttention(cache)
    outs = torch.zeros(2, len(layers), *q.shape, device=CUDA, dtype=BF16)
    for backend, out in zip((expected, ours), outs, strict=True):
        attended = torch.zeros_like(q)
        attend = backend.mixed(decodes, prefills, q, attended)
        for layer in layers:
            attend(layer)
            out[layer.index] = attended
    for layer in layers:
        assert error_of(outs[1, layer.index], outs[0, layer.index]) < TOLERANCE, layer


def test_slopes_of_a_mixed_step() -> None:
    """ALiBi: two decodes, 40 tokens after 300 old ones, 70 new ones."""
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    layer = replace(layer_with(None, 0, None), slopes=torch.rand(HEADS, device=CUDA) / 8)
    cache, _ = make_caches(200)
    pages = torch.randperm(199)[:160].int() + 1
    positions = torch.tensor([600, 17], device=CUDA, dtype=torch.int32)
    decodes = DecodeRows((pages[:80].view(2, 40).cuda(),), positions)
    prefills = PrefillRows(
        np.array([0, 40, 110], np.int32), np.array([340, 70], np.int32),
        np.array([0, 22, 27], np.int32), pages[None, 80:107].numpy(),
    )  # fmt: skip
    q = random(112, HEADS, HEAD_DIM)
    ours, expected = torch.zeros_like(q), torch.zeros_like(q)
    TorchAttention(cache).mixed(decodes, prefills, q, expected)(layer)
    FlashInferAttention(cache, [layer]).mixed(decodes, prefills, q, ours)(layer)
    assert error_of(ours, expected) < TOLERANCE
