"""The matrix product of one row against float64: odd shapes, biases, all that is fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# with a bias, gated, parts of the squares (0: no factor to come)
VARIANTS = [(False, False, 0), (True, False, 37), (False, True, 1), (True, True, 37)]
SHAPES = [(6144, 4096), (1024, 3072), (512, 192), (98, 256), (4098, 11008), (34, 40)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.bfloat16) for shape in SHAPES), (SHAPES[1], torch.float16)],
)
def test_products_equal_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from asyncllm.kernels.gemv.kernel import gemv
    from asyncllm.models.layers.ops import Normed

    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-3
    out_features, size = shape
    weight = random(*shape, dtype=dtype) / size**0.5
    for biased, gated, parts in VARIANTS:
        x = random(1, size, dtype=dtype)
        bias = random(out_features, dtype=dtype) if biased else None
        exact, normed = x.double(), Normed(x)
        if parts:
            normed = Normed(x, torch.rand(1, parts, device="cuda") * size, 1e-5)
            mean = normed.squares.double().sum(1, keepdim=True) / size
            exact = exact * (mean + 1e-5).rsqrt()
        exact = F.linear(exact, weight.double(), bias.double() if bias is not None else None)
        if gated:
            gate, up = exact.chunk(2, dim=1)
            exact = F.silu(gate) * up
        ours = gemv(normed, weight, bias, gated)
        assert relative_error(ours, exact) < tolerance, (biased, gated, parts)


def test_one_feature() -> None:
    """As of a gate of shared experts; Triton takes a 1 for a constant."""
    from asyncllm.kernels.gemv.kernel import gemv
    from asyncllm.models.layers.ops import Normed

    x, weight = (random(1, 2048, dtype=torch.bfloat16) for _ in range(2))
    ours = gemv(Normed(x), weight, None)
    torch.testing.assert_close(ours.double(), x.double() @ weight.double().T, rtol=4e-3, atol=0.3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_and_its_norm_equal_float64(shape: tuple[int, int], biased: bool) -> None:
    from asyncllm.kernels.gemv.kernel import gemv_add_norm
    from asyncllm.models.layers.ops import Norm

    dtype = torch.bfloat16
    out_features, size = shape
    weight = random(*shape, dtype=dtype) / size**0.5
    x, residual = random(1, size, dtype=dtype), random(1, out_features, dtype=dtype)
    bias = random(out_features, dtype=dtype) if biased else None
    norm = Norm(torch.rand(out_features, device="cuda", dtype=dtype) + 0.5, 1e-5)
    exact = residual.double() + F.linear(
        x.double(), weight.double(), bias.double() if bias is not None else None
    )
    normed = gemv_add_norm(x, weight, bias, residual, norm)
    assert relative_error(residual, exact) < 3e-3
    assert normed.squares is not None
    mean = normed.squares.double().sum(1, keepdim=True) / out_features
    ours = normed.values.double() * (mean + norm.eps).rsqrt()
    exact_norm = exact * (exact.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert relative_error(ours, exact_norm) < 4e-3


def test_a_captured_chain_equals_its_steps_one_by_one() -> None:
    """Kernels of a chain start before their predecessors end: whatever they read must be there."""
    from asyncllm.kernels.gemv.kernel import gemv, gemv_add_norm
    from asyncllm.models.layers.ops import Norm, Normed

    size, depth = 1024, 40
    up = [random(2 * size, size, dtype=torch.bfloat16) / 32 for _ in range(depth)]
    down = [random(size, size, dtype=torch.bfloat16) / 64 for _ in range(depth)]
    norm = Norm(torch.rand(size, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5)
    start = random(1, size, dtype=torch.bfloat16)
    residual = torch.empty_like(start)

    def chain(synchronise: bool) -> torch.Tensor:
        residual.copy_(start)
        x = Normed(residual.clone())
        for a, b in zip(up, down, strict=True):
            y = gemv(x, a, None, gated=True)
            if synchronise:
                torch.cuda.synchronize()
            x = gemv_add_norm(y, b, None, residual, norm)
            if synchronise:
                torch.cuda.synchronize()
        return x.values

    expected = chain(True).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = chain(False)
    for _ in range(50):
        graph.replay()
        assert torch.equal(values, expected)
