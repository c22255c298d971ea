"""CUDA kernels against their torch references; skipped where there is no CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.types import NON_FINITE_TOKEN
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.packed_step import Feature
from asyncllm.worker.token_masks import NO_MASK, RowMasks, TokenMaskBuffer
from tests.caches import uniform_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.float() - reference.float()).norm() / reference.float().norm()).item()


@pytest.mark.parametrize("tokens", [1, 5, 33, 4096])
def test_ops_equal_torch(tokens: int) -> None:
    from asyncllm.models.layers.cuda_ops import CudaOps
    from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed, SwiGLU
    from asyncllm.models.layers.torch_ops import TorchOps
    from tests.models.with_epilogue import with_epilogue

    fast, slow = CudaOps(torch.device("cuda")), TorchOps()
    x, residual = (torch.randn(tokens, 1024, device=CUDA, dtype=BF16) for _ in range(2))
    weight = torch.randn(1024, 1024, device=CUDA, dtype=BF16) / 32
    norm = Norm(torch.rand(1024, device=CUDA, dtype=BF16) + 0.5, 1e-5)
    assert relative_error(fast.rms_norm(x, norm), slow.rms_norm(x, norm)) < 6e-3
    residuals = residual.clone(), residual.clone()
    sums = [
        with_epilogue(ops, Normed(x), weight, AddRMSNorm(r, norm))
        for ops, r in zip((fast, slow), residuals, strict=True)
    ]
    assert relative_error(*residuals) < 6e-3
    assert relative_error(fast.product(sums[0], weight), slow.product(sums[1], weight)) < 8e-3
    gated = [
        with_epilogue(ops, x, weight, SwiGLU()) for ops, x in zip((fast, slow), sums, strict=True)
    ]
    assert relative_error(*gated) < 1.5e-2
    assert relative_error(fast.product(Normed(x), weight), slow.product(Normed(x), weight)) < 6e-3


@pytest.mark.parametrize("tokens", [1, 19, 300])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (6, 2, 96), (32, 8, 128)])
def test_heads_kernel_equals_torch(
    tokens: int, normed: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
    from asyncllm.attention.heads import rotated_heads
    from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, dtype=BF16)

    norm = HeadNorm(random(head_dim), random(head_dim), 1e-6) if normed else None
    layer = AttentionLayer(0, heads, kv_heads, head_dim, head_dim**-0.5, None, norm)
    angles = torch.rand(500, head_dim // 2, device=CUDA) * 6
    rows = torch.randint(0, 500, (tokens,), device=CUDA, dtype=torch.int32)
    rotation = Rotation(rows, torch.cat([angles.cos(), angles.sin()], dim=1))
    caches = [
        uniform_cache(
            num_layers=1, num_pages=40, block_size=16, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=BF16, device=CUDA,
        )
        for _ in range(2)
    ]  # fmt: skip
    slots = torch.randperm(640, device=CUDA)[:tokens]
    qkv = random(tokens, heads + 2 * kv_heads, head_dim)
    ours = rotate_and_write(layer, qkv.clone(), rotation, caches[0].layers[0], slots)
    q, k, v = rotated_heads(layer, qkv.clone(), rotation)
    caches[1].write(0, slots, k, v)
    assert relative_error(ours, q) < 6e-3
    assert relative_error(caches[0].layers[0], caches[1].layers[0]) < 6e-3
    assert torch.equal(caches[0].layers[0][:, 1], caches[1].layers[0][:, 1])  # values as they were


def test_masks_are_written_where_nobody_reads() -> None:
    """Their memory must not be what a kernel of the step's stream is still about to read."""
    rows, vocab = 256, 128256
    read_late = torch.zeros(rows * vocab // 32, device=CUDA, dtype=torch.int32)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)  # a tenth of a second
    seen = read_late.clone()
    del read_late
    buffer = TokenMaskBuffer(rows, vocab, CUDA)
    buffer.host()[:] = -1
    masks = buffer.upload(np.arange(rows), rows)
    assert (masks.bits == -1).all()
    assert (seen == 0).all()


def some_masks(rows: int, vocab: int) -> RowMasks:
    """Random masks for every other row, in any order."""
    num_masks = (rows + 1) // 2
    of_row = torch.full((rows,), NO_MASK, dtype=torch.int32, device=CUDA)
    of_row[::2] = torch.randperm(num_masks, device=CUDA).int()
    bits = torch.randint(-(2**31), 2**31, (num_masks, -(-vocab // 32)), device=CUDA).int()
    return RowMasks(of_row, bits)


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("vocab", [97, 4096, 128256])
@pytest.mark.parametrize("in_slots", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_sampling_slots_equals_the_full_way(
    rows: int, vocab: int, in_slots: bool, masked: bool
) -> None:
    """And, where all is finite, what torch has masked before. The same kernel draws in all, so that
    not even near ties differ."""
    from asyncllm.kernels.sampling.kernel import sample_slots_triton
    from asyncllm.worker.sampler import sample_fully
    from asyncllm.worker.token_masks import apply_masks_torch

    logits = (torch.randn(rows, vocab, device=CUDA) * 3).to(BF16)
    logits[rows // 2, vocab - 1], logits[rows // 3, 0] = float("nan"), float("inf")
    slots = torch.randperm(300, device=CUDA)[:rows].int() + 1
    positions = torch.randint(1, 9999, (rows,), device=CUDA, dtype=torch.int32)
    temperatures = torch.rand(301, device=CUDA) * 2
    temperatures[::3] = 0
    top_ks = torch.randint(0, 60, (301,), device=CUDA, dtype=torch.int32)
    top_ps = torch.rand(301, device=CUDA).clamp(min=0.05)
    min_ps = torch.rand(301, device=CUDA) / 5
    top_ks[::2], top_ps[::4], min_ps[::5] = 0, 1.0, 0.0
    seeds = torch.randint(-(2**62), 2**62, (301,), device=CUDA)
    masks = some_masks(rows, vocab) if masked else None
    results = []
    for form in ("plainly", "fully", "masked before"):
        state = DeviceState(301, 8, vocab, CUDA)
        state.temperatures.copy_(temperatures)
        state.seeds.copy_(seeds)
        state.top_ks.copy_(top_ks)
        state.top_ps.copy_(top_ps)
        state.min_ps.copy_(min_ps)
        if in_slots:
            state.positions[slots] = positions
        given = None if in_slots else positions
        if form == "plainly":
            tokens = sample_slots_triton(state, logits, slots, given, masks)
        elif form == "fully":
            tokens = sample_fully(
                sample_slots_triton, state, logits, slots, given, Feature.MASK, None, masks
            )
        else:
            before = logits.float()
            if masks is not None:
                apply_masks_torch(before, masks)
            tokens = sample_slots_triton(state, before, slots, given, None)
        results.append((tokens, state.last_tokens, state.positions))
    (ours, _, our_positions), (expected, _, expected_positions), (masked_before, *_) = results
    assert torch.equal(ours, expected)
    poisoned = torch.zeros(rows, dtype=torch.bool, device=CUDA)
    poisoned[rows // 2] = poisoned[rows // 3] = True
    assert torch.equal(ours[~poisoned], masked_before[~poisoned])
    assert ours[rows // 2].item() == NON_FINITE_TOKEN
    assert torch.equal(our_positions, expected_positions)
    finite = ours >= 0  # where logits are not, the state holds any token
    assert torch.equal(results[0][1][slots][finite], results[1][1][slots][finite])


def test_masks_arrive_beside_the_stream_that_reads_them() -> None:
    """Again and again through one pinned buffer: each step reads its own, never the next one's."""
    from asyncllm.worker.token_masks import TokenMaskBuffer

    buffer = TokenMaskBuffer(256, 128256, CUDA)
    stream = torch.cuda.Stream()
    rng = np.random.default_rng(0)
    busy = torch.randn(4096, 4096, device=CUDA)
    for step in range(20):
        num_masks = int(rng.integers(1, 257))
        rows = rng.permutation(256)[:num_masks].astype(np.int32)
        host = buffer.host()
        host[:num_masks] = rng.integers(-(2**31), 2**31, (num_masks, 1))
        with torch.cuda.stream(buffer._stream):
            torch.cuda._sleep(20_000_000)  # the copy comes late: only the event makes readers wait
        with torch.cuda.stream(stream):
            for _ in range(step % 3):
                busy @ busy
            masks = buffer.upload(rows, 256)
            of_row, bits = masks.of_row.clone(), masks.bits.clone()
        stream.synchronize()
        expected = np.full(256, NO_MASK, np.int32)
        expected[rows] = np.arange(num_masks)
        assert np.array_equal(of_row.cpu().numpy(), expected)
        assert np.array_equal(bits.cpu().numpy(), host[:num_masks])
