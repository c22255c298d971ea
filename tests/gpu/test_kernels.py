"""CUDA kernels against their torch references; skipped where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("vocab", [97, 4096, 128256])
def test_plain_sampling_equals_torch(rows: int, vocab: int) -> None:
    from asyncllm.worker.sampler import plain_sample_torch
    from asyncllm.worker.sampling_kernels import plain_sample_triton

    logits = (torch.randn(rows, vocab, device=CUDA) * 3).to(BF16)
    temperatures = torch.rand(rows, device=CUDA) * 2
    temperatures[::3] = 0
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=CUDA)
    positions = torch.randint(0, 10000, (rows,), device=CUDA, dtype=torch.int32)
    ours = plain_sample_triton(logits, temperatures, seeds, positions)
    reference = plain_sample_torch(logits, temperatures, seeds, positions)
    greedy = temperatures == 0
    # The logarithms differ in their last bits, which may turn a rare near tie of noise.
    assert torch.equal(ours[greedy], reference[greedy])
    assert (ours != reference).float().mean().item() <= 0.02


@pytest.mark.parametrize("vocab", [4096, 128256])
def test_top_k_top_p_equals_torch(vocab: int) -> None:
    from asyncllm.worker.sampler import top_k_top_p_torch
    from asyncllm.worker.sampling_kernels import top_k_top_p_flashinfer

    logits = torch.randn(64, vocab, device=CUDA) * 3
    top_ks = torch.randint(0, 60, (64,), device=CUDA, dtype=torch.int32)
    top_ps = torch.rand(64, device=CUDA).clamp(min=0.05)
    top_ks[::3], top_ps[::4] = 0, 1.0
    ours = top_k_top_p_flashinfer(logits, top_ks, top_ps).isfinite()
    reference = top_k_top_p_torch(logits, top_ks, top_ps).isfinite()
    off = (top_ks == 0) & (top_ps >= 1)
    assert ours[off].all()
    assert ours.gather(1, logits.argmax(1, keepdim=True)).all()
    # Sums in another order move the edge of a nucleus by a token at most.
    assert ((ours != reference).sum(1) <= 1).all()


@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_elementwise_ops_equal_torch(tokens: int) -> None:
    from asyncllm.models.layers.flashinfer_ops import FlashInferOps
    from asyncllm.models.layers.torch_ops import TorchOps

    fast, slow = FlashInferOps(), TorchOps()
    x = torch.randn(tokens, 1024, device=CUDA, dtype=BF16)
    weight = torch.randn(1024, device=CUDA, dtype=BF16)
    assert relative_error(fast.rms_norm(x, weight, 1e-5), slow.rms_norm(x, weight, 1e-5)) < 5e-3
    gate_up = torch.randn(tokens, 2048, device=CUDA, dtype=BF16)
    assert relative_error(fast.silu_and_mul(gate_up), slow.silu_and_mul(gate_up)) < 5e-3
    pair = (x, torch.randn_like(x))
    a, b = [t.clone() for t in pair], [t.clone() for t in pair]
    fast.add_rms_norm(*a, weight, 1e-5)
    slow.add_rms_norm(*b, weight, 1e-5)
    assert relative_error(a[0], b[0]) < 5e-3 and relative_error(a[1], b[1]) < 5e-3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_and_head_norm_on_views_of_a_merged_projection(head_dim: int) -> None:
    from asyncllm.models.layers.flashinfer_ops import FlashInferOps
    from asyncllm.models.layers.torch_ops import TorchOps

    fast, slow = FlashInferOps(), TorchOps()
    qkv = torch.randn(19, 12, head_dim, device=CUDA, dtype=BF16)
    weight = torch.randn(head_dim, device=CUDA, dtype=BF16)
    angles = torch.rand(500, head_dim // 2, device=CUDA) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 500, (19,), device=CUDA, dtype=torch.int32)
    results = []
    for ops in (fast, slow):
        q, k, v = qkv.clone().split([8, 2, 2], dim=1)
        q_normed = ops.rms_norm(q, weight, 1e-6)
        before = v.clone()
        ops.rotate(q, k, positions, cos_sin)
        assert torch.equal(v, before)
        results.append((q.clone(), k.clone(), q_normed))
    for ours, reference in zip(*results, strict=True):
        assert relative_error(ours, reference) < 6e-3


def test_kv_write_equals_torch() -> None:
    from asyncllm.attention.kv_cache import KVCache
    from asyncllm.attention.kv_write import write_kv

    def make() -> KVCache:
        return KVCache(
            num_layers=1, num_pages=20, block_size=16, num_kv_heads=3, head_dim=64,
            dtype=BF16, device=CUDA,
        )  # fmt: skip

    ours, reference = make(), make()
    qkv = torch.randn(50, 9, 64, device=CUDA, dtype=BF16)
    _, k, v = qkv.split([3, 3, 3], dim=1)
    slots = torch.randperm(320, device=CUDA)[:50]
    write_kv(ours.layers[0], slots, k, v)
    reference.write(0, slots, k, v)
    assert torch.equal(ours.layers[0], reference.layers[0])
