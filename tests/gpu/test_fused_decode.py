"""The kernel from projection to attention output against torch, and the one for a step's rows."""

from __future__ import annotations

import pytest
import torch

from asyncllm.attention.base import AttentionLayer, DecodeRows, HeadNorm, Rotation
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.worker.device_state import DeviceState
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
PAGES = 130


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "normed"),
    [
        (32, 8, 128, None, False),
        (16, 8, 128, None, True),
        (8, 2, 64, 100, True),
        (6, 2, 96, None, False),
        (16, 1, 256, None, False),
        (14, 2, 64, 1000, False),
        (4, 4, 32, None, True),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_equals_torch(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    from asyncllm.kernels.fused_decode.kernel import FusedDecode

    norm = None
    if normed:
        norm = HeadNorm(random(head_dim, dtype=dtype), random(head_dim, dtype=dtype), 1e-6)
    layer = AttentionLayer(0, heads, kv_heads, head_dim, head_dim**-0.5, window, norm)
    positions = torch.randint(0, PAGES * 16, (rows,), device=CUDA, dtype=torch.int32)
    positions[0] = PAGES * 16 - 1
    if rows > 2:
        positions[1], positions[2] = 0, 64
    tables = (torch.randperm(rows * PAGES, device=CUDA) + 1).view(rows, PAGES).int()
    angles = torch.rand(PAGES * 16, head_dim // 2, device=CUDA) * 6
    rotation = Rotation(positions, torch.cat([angles.cos(), angles.sin()], dim=1))
    content = random(rows * PAGES + 1, 2, 16, kv_heads, head_dim, dtype=dtype)
    caches = []
    for _ in range(2):
        cache = uniform_cache(
            num_layers=1, num_pages=len(content), block_size=16, num_kv_heads=kv_heads,
            head_dim=head_dim, dtype=dtype, device=CUDA,
        )  # fmt: skip
        cache.layers[0].copy_(content)
        caches.append(cache)
    qkv = random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    reference = TorchAttention(caches[0]).decode(DecodeRows((tables,), positions))
    expected = reference(layer, qkv.clone(), rotation)
    fused = FusedDecode(layer, 16, 132, CUDA)
    for num_splits in (None, 1, 7, 32):  # again and again with one workspace
        caches[1].layers[0].copy_(content)
        ours = fused(
            layer, qkv, rotation, caches[1].layers[0], tables, positions, num_splits=num_splits
        )
        error = (ours.float() - expected.float()).norm() / expected.float().norm()
        assert error < 8e-3, num_splits
        difference = (caches[1].layers[0] - caches[0].layers[0]).float().norm()
        assert difference < 8e-3 * content[: 2 * rows].float().norm()
        assert torch.equal(caches[1].layers[0][:, 1], caches[0].layers[0][:, 1])  # values as are


def penalise_some(state: DeviceState) -> None:
    """Every other slot, in one way or another; the padding slot as nobody set it."""
    for penalties, first in (
        (state.presence_penalties, 2),
        (state.frequency_penalties, 4),
        (state.repetition_penalties, 6),
    ):
        penalties[first::6] = -0.5 if first < 6 else 1.2
    state.repetition_penalties[1:].clamp_(min=1)


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_rows_of_slots_equal_torch(rows: int) -> None:
    from asyncllm.kernels.slots.kernel import gather_slots_triton
    from asyncllm.worker.device_state import gather_slots_torch

    state = DeviceState(128, 1500, 5000, CUDA, num_groups=2)
    state.last_tokens.copy_(torch.randint(0, 5000, (128,), device=CUDA))
    state.positions.copy_(torch.randint(0, 9999, (128,), device=CUDA))
    state.block_tables.copy_(torch.randint(0, 99, (2, 128, 1500), device=CUDA))
    penalise_some(state)
    slots = torch.randperm(128, device=CUDA)[:rows].int()
    ours = gather_slots_triton(state, slots)
    counted = state.output_counts.clone()
    state.output_counts.zero_()
    expected = gather_slots_torch(state, slots)
    assert torch.equal(counted, state.output_counts)
    (*our_vectors, our_rows), (*vectors, rows) = ours, expected
    our_vectors += [our_rows.positions, *our_rows.block_tables]
    vectors += [rows.positions, *rows.block_tables]
    assert [torch.equal(*pair) for pair in zip(our_vectors, vectors, strict=True)] == [True] * 5
