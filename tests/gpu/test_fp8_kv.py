"""FP8 pages by our kernels, and FlashInfer's for prompts, against torch's attention over the same.

What needs no FlashInfer also runs in Triton's interpreter (TRITON_INTERPRET=1), whose conversion to
FP8 does not round to the nearest.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionLayer, DecodeRows, PrefillRows, Rotation
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.kv_cache import KVCache, KVScales
from asyncllm.attention.torch_native import TorchAttention

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"
    ),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGES = (4, 2, 16, 4) if INTERPRETED else (32, 8, 128, 40)
# Other query heads, KV heads and head_dims: groups of one part and of two, words that are padded.
SHAPES = [(2, 2, 64), (33, 1, 48), (3, 1, 256)] if INTERPRETED else [
    (64, 8, 64), (8, 4, 256), (48, 1, 128), (32, 32, 128),
]  # fmt: skip
SCALES = (0.05, 0.2)
TOLERANCE = 1e-3 if INTERPRETED else 1e-2  # of what is read, in float16
STEP = 0.2 if INTERPRETED else 0.05  # of what is written: a number may go to either neighbour
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [(None, False, None), (None, True, 40), (5.0, False, None)]  # soft cap, sinks, window
# FlashInfer compiles a module for each kind of prompts, in a minute or two: not of all.
ALL_KINDS = [*((E4M3, *kind) for kind in KINDS), (E5M2, *KINDS[1])]
PROMPT_KINDS = [*((E4M3, *kind) for kind in KINDS[:2]), (E5M2, *KINDS[0])]
FIELDS = ("dtype", "soft_cap", "sinks", "window")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def layer_of(
    soft_cap: float | None,
    sinks: bool,
    window: int | None,
    shape: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM),
) -> AttentionLayer:
    values = random(shape[0]) if sinks else None
    return AttentionLayer(0, *shape, 0.2, window, None, soft_cap, values)


def caches(layer: AttentionLayer, dtype: torch.dtype, num_pages: int) -> tuple[KVCache, KVCache]:
    layout = CacheLayout([layer], 16, dtype)
    scales = KVScales([SCALES[0]], [SCALES[1]])
    made = [KVCache(layout, num_pages, DEVICE, scales=scales) for _ in range(2)]
    # In float32, as torch converts no other to FP8 in place.
    made[0].layers[0].copy_(torch.randn(made[0].layers[0].shape, device=DEVICE) * 8)
    made[1].layers[0].copy_(made[0].layers[0])
    return made[0], made[1]


def error_of(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.float() - reference.float()).norm() / reference.float().norm()).item()


@pytest.mark.parametrize(FIELDS, ALL_KINDS)
def test_decode(
    dtype: torch.dtype, soft_cap: float | None, sinks: bool, window: int | None
) -> None:
    decode(layer_of(soft_cap, sinks, window), dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    decode(layer_of(None, False, 40, shape), dtype)


def decode(layer: AttentionLayer, dtype: torch.dtype) -> None:
    from asyncllm.kernels.paged_decode.kernel import paged_decode
    from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

    rows, heads_of_all = 3, layer.num_heads + 2 * layer.num_kv_heads
    ours, reference = caches(layer, dtype, 1 + rows * PAGES)
    tables = (torch.randperm(rows * PAGES, device=DEVICE) + 1).view(rows, PAGES).int()
    positions = torch.randint(0, PAGES * 16, (rows,), device=DEVICE, dtype=torch.int32)
    decodes = DecodeRows((tables,), positions)
    heads = random(rows, heads_of_all, layer.head_dim)
    angles = torch.rand(PAGES * 16, layer.head_dim // 2, device=DEVICE) * 6
    rotation = Rotation(positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    expected = TorchAttention(reference).decode(decodes)(layer, heads.clone(), rotation)
    slots = decodes.write_slots(16)[0]
    q = rotate_and_write(layer, heads, rotation, ours.layers[0], slots, scales=SCALES)
    assert error_of(ours.layers[0], reference.layers[0]) < STEP
    ours.layers[0].copy_(reference.layers[0])
    out = torch.empty_like(q)
    paged_decode(
        q, ours.layers[0], tables, positions, out, scale=layer.scale, window=layer.window,
        num_sms=4, soft_cap=layer.soft_cap, sinks=layer.sinks, kv_scales=SCALES,
    )  # fmt: skip
    assert error_of(out.flatten(1), expected) < TOLERANCE


@pytest.mark.skipif(INTERPRETED, reason="needs FlashInfer")
@pytest.mark.parametrize(FIELDS, PROMPT_KINDS)
def test_mixed_step(
    dtype: torch.dtype, soft_cap: float | None, sinks: bool, window: int | None
) -> None:
    """Two decodes, 40 tokens after 300 old ones, 70 new ones."""
    backend = pytest.importorskip("asyncllm.attention.flashinfer.backend")
    layer = layer_of(soft_cap, sinks, window)
    cache, _ = caches(layer, dtype, 200)
    pages = torch.randperm(199)[:160].int() + 1
    decodes = DecodeRows(
        (pages[:80].view(2, 40).cuda(),), torch.tensor([600, 17], device=DEVICE, dtype=torch.int32)
    )
    prefills = PrefillRows(
        np.array([0, 40, 110], np.int32), np.array([340, 70], np.int32),
        np.array([0, 22, 27], np.int32), pages[None, 80:107].numpy(),
    )  # fmt: skip
    q = random(112, HEADS, HEAD_DIM)
    ours, expected = torch.zeros_like(q), torch.zeros_like(q)
    TorchAttention(cache).mixed(decodes, prefills, q, expected)(layer)
    backend.FlashInferAttention(cache, [layer], DTYPE).mixed(decodes, prefills, q, ours)(layer)
    assert error_of(ours, expected) < TOLERANCE
