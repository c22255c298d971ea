"""Kernels between products of many rows against float64; its variants, and chains of launches."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
from asyncllm.commands.triton_kernels import print_compiled
from asyncllm.kernels.declaration import DenseShape, Start
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed, SwiGLU
from asyncllm.models.layers.torch_ops import TorchOps
from tests.models.with_epilogue import with_epilogue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
MOST_ROWS = 700
SIZES = [64, 97, 1000, 1024, 3072, 3584, 4096, 5120, 14336, 16383, 16384]
HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=dtype)


def some_norm(size: int, dtype: torch.dtype = torch.bfloat16) -> Norm:
    return Norm(torch.rand(size, device=CUDA, dtype=dtype) + 0.5, 1e-5)


def norm64(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", SIZES)
def test_norms(size: int, dtype: torch.dtype) -> None:
    from asyncllm.kernels.rms_norm.kernel import add_rms_norm, rms_norm

    x, residual = (random(MOST_ROWS, size, dtype=dtype) for _ in range(2))
    norm = some_norm(size, dtype)
    whole = rms_norm(x, norm)
    assert relative_error(whole, norm64(x, norm)) < TOLERANCE[dtype]
    sums, normed = residual.clone(), x.clone()
    add_rms_norm(normed, sums, norm)
    assert torch.equal(sums, residual + x)
    assert relative_error(normed, norm64(sums, norm)) < TOLERANCE[dtype]
    for rows in range(1, MOST_ROWS + 1, 1 if size <= 4096 else 37):
        assert torch.equal(rms_norm(x[:rows], norm), whole[:rows])
    for rows in range(1, MOST_ROWS, 1 if size <= 4096 else 37):
        x2, residual2 = x[: rows + 1].clone(), residual[: rows + 1].clone()
        add_rms_norm(x2[:rows], residual2[:rows], norm)
        assert torch.equal(x2[:rows], normed[:rows])
        assert torch.equal(residual2[:rows], sums[:rows])
        assert torch.equal(x2[rows], x[rows])  # the row behind is left alone
        assert torch.equal(residual2[rows], residual[rows])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", SIZES)
def test_centered_norms(size: int, dtype: torch.dtype) -> None:
    from asyncllm.kernels.rms_norm.kernel import add_rms_norm, rms_norm

    x, residual = (random(9, size, dtype=dtype) + 2 for _ in range(2))
    weight = torch.rand(size, device=CUDA) + 0.5
    norm = Norm(weight, 1e-5, centered=True)
    slow = TorchOps()
    assert relative_error(rms_norm(x, norm), slow.rms_norm(x, norm)) < TOLERANCE[dtype]
    sums, normed = residual.clone(), x.clone()
    add_rms_norm(normed, sums, norm)
    assert torch.equal(sums, residual + x)
    assert relative_error(normed, slow.rms_norm(sums, norm)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", SIZES)
def test_swiglu(size: int, dtype: torch.dtype) -> None:
    from asyncllm.kernels.rms_norm.kernel import swiglu

    x = random(MOST_ROWS, 2 * size, dtype=dtype) * 4
    x[:, :size:7] *= 20  # where the exponential is 0 or infinite
    gate, up = x.double().chunk(2, dim=1)
    whole = swiglu(x)
    assert relative_error(whole, F.silu(gate) * up) < TOLERANCE[dtype]
    for rows in range(1, MOST_ROWS + 1, 1 if size <= 4096 else 37):
        assert torch.equal(swiglu(x[:rows]), whole[:rows])


def test_more_elements_than_32_bits_count() -> None:
    from asyncllm.kernels.rms_norm.kernel import swiglu

    rows, size = (1 << 31) // (2 * 14336) + 3, 14336
    x = torch.zeros(rows, 2 * size, device=CUDA, dtype=torch.bfloat16)
    x[-2:] = random(2, 2 * size)
    assert torch.equal(swiglu(x)[-2:], swiglu(x[-2:].clone()))


@pytest.mark.parametrize("rows", [2, 17, 300])
def test_ops_equal_torch(rows: int) -> None:
    from asyncllm.models.layers.cuda_ops import CudaOps

    fast, slow = CudaOps(CUDA), TorchOps()
    size, intermediate = 3616, 4736  # no multiple of 64: skinny_gemm leaves it alone
    x, residual = random(rows, size), random(rows, size)
    down, up = random(size, size) / 60, random(2 * intermediate, size) / 60
    norm = some_norm(size)
    residuals = residual.clone(), residual.clone()
    sums = [
        with_epilogue(ops, Normed(x), down, AddRMSNorm(r, norm))
        for ops, r in zip((fast, slow), residuals, strict=True)
    ]
    assert torch.equal(*residuals)
    assert relative_error(sums[0].values, sums[1].values) < 6e-3
    gated = [with_epilogue(ops, sums[1], up, SwiGLU()) for ops in (fast, slow)]
    assert relative_error(*gated) < 6e-3
    assert relative_error(fast.rms_norm(x, norm), slow.rms_norm(x, norm)) < 6e-3


def test_no_step_compiles_what_was_launched_early() -> None:
    from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write
    from asyncllm.models.layers.cuda_ops import CudaOps
    from asyncllm.worker.kernel_prewarm import KernelPrewarm

    size, intermediate = 2240, 2496  # nobody else's: what another test compiled says nothing
    ops, early = CudaOps(CUDA), KernelPrewarm(CUDA)
    layer = AttentionLayer(0, 10, 5, 72, 72**-0.5, None, None)
    start = Start(
        device=CUDA, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, block_size=16, layers=[layer],
        sizes=DenseShape(1, size, intermediate, 8), dense_weights="PLAIN",
        attention_backend="flashinfer", has_fast_ops=True, captures_prefills=True,
        free_decode_sizes=(), new_state=pytest.fail,
    )  # fmt: skip
    with print_compiled() as launched:
        for name in ("rms_norm", "rope_kv_write"):
            for launch in import_module(f"asyncllm.kernels.{name}.kernel").prewarm(start):
                early.begin(launch)
        early.wait()
    names = sorted(kernel.name for kernel in launched)
    assert names == [*["_heads_kernel"] * 2, *["_norm_kernel"] * 2, "_swiglu_kernel"]
    up, down = random(2 * intermediate, size), random(size, intermediate)
    norm = some_norm(size)
    cos_sin = torch.rand(7, 72, device=CUDA)
    pages = torch.zeros(129, 2, 16, 5, 72, device=CUDA, dtype=torch.bfloat16)
    with print_compiled() as launched:
        for rows in (2, 3, 16, 17, 128, 513, 2048):
            residual = random(rows, size)
            x = Normed(ops.rms_norm(residual, norm))
            gated = Normed(with_epilogue(ops, x, up, SwiGLU()))
            with_epilogue(ops, gated, down, AddRMSNorm(residual, norm))
        for rows in (1, 2, 33, 64, 65, 513, 2048):
            # Slices as of one tensor: aligned or not.
            rotation = Rotation(torch.zeros(2 * rows, device=CUDA).int()[rows:], cos_sin)
            slots = torch.arange(16, 2064, device=CUDA)[-rows:]
            rotate_and_write(layer, random(rows, 20, 72), rotation, pages, slots)
        ops.rms_norm(random(1, size), norm)
    assert not launched


@pytest.mark.parametrize("rows", [40, 300])
def test_a_captured_chain_equals_its_launches_one_by_one(rows: int) -> None:
    """Kernels of a chain start before their predecessors end: whatever they read must be there."""
    from asyncllm.kernels.rope_kv_write.kernel import rotate_and_write
    from asyncllm.models.layers.cuda_ops import CudaOps

    size, intermediate, heads, kv_heads, dim, depth = 1024, 3072, 8, 4, 128, 20
    ops, norm = CudaOps(CUDA), some_norm(size)
    head_norm = HeadNorm(random(dim), random(dim), 1e-6)
    layer = AttentionLayer(0, heads, kv_heads, dim, dim**-0.5, None, head_norm)
    cos_sin = torch.rand(500, dim, device=CUDA)
    pages = torch.zeros(40, 2, 16, kv_heads, dim, device=CUDA, dtype=torch.bfloat16)
    qkv, o = random((heads + 2 * kv_heads) * dim, size) / 32, random(size, heads * dim) / 32
    up, down = random(2 * intermediate, size) / 32, random(size, intermediate) / 64
    start, rotated = random(rows, size), torch.randint(500, (rows,), device=CUDA).int()
    slots = torch.randperm(640, device=CUDA)[:rows]

    def chain(between: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
        where, rotation = slots + 0, Rotation(rotated + 0, cos_sin)
        residual = start.clone()
        x = Normed(ops.rms_norm(residual, norm))
        for _ in range(depth):
            projected = ops.product(x, qkv).unflatten(-1, (-1, dim))
            between()
            q = rotate_and_write(layer, projected, rotation, pages, where)
            between()
            x = with_epilogue(ops, Normed(q.flatten(1)), o, AddRMSNorm(residual, norm))
            between()
            y = Normed(with_epilogue(ops, x, up, SwiGLU()))
            between()
            x = with_epilogue(ops, y, down, AddRMSNorm(residual, norm))
            between()
        return x.values, residual

    expected = [values.clone() for values in chain(torch.cuda.synchronize)]
    expected_pages = pages.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = chain(lambda: None)
    for _ in range(30):
        pages.zero_()
        graph.replay()
        for ours, theirs in zip((*values, pages), (*expected, expected_pages), strict=True):
            assert torch.equal(ours, theirs)
