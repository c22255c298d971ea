"""GEMMs of 2 to 32 rows against float64: odd shapes, biases, all that is fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncllm.kernels.skinny_gemm import SkinnyGemm
from asyncllm.models.layers.ops import Norm, Normed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# with a bias, gated, parts of the squares (0: no factor to come)
VARIANTS = [(False, False, 0), (True, False, 37), (False, True, 1), (True, True, 37)]
SHAPES = [(4096, 1024), (1024, 3072), (512, 192), (6144, 4096), (40, 576), (1032, 64)]
ROWS = [2, 8, 9, 16, 17, 32]


@pytest.fixture(scope="module")
def skinny_gemm() -> SkinnyGemm:
    return SkinnyGemm(torch.device("cuda"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64(skinny_gemm: SkinnyGemm, shape: tuple[int, int], rows: int) -> None:
    out_features, size = shape
    weight = random(*shape) / size**0.5
    for biased, gated, parts in VARIANTS:
        x = random(rows, size)
        bias = random(out_features) if biased else None
        exact, normed = x.double(), Normed(x)
        if parts:
            normed = Normed(x, torch.rand(rows, parts, device="cuda") * size, 1e-5)
            mean = normed.squares.double().sum(1, keepdim=True) / size
            exact = exact * (mean + 1e-5).rsqrt()
        exact = F.linear(exact, weight.double(), bias.double() if bias is not None else None)
        if gated:
            gate, up = exact.chunk(2, dim=1)
            exact = F.silu(gate) * up
        skinny_gemm.takes(normed, weight)  # waits for the compiler
        ours = skinny_gemm.linear(normed, weight, bias, gated)
        assert relative_error(ours, exact) < 4e-3, (biased, gated, parts)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_and_its_norm_equal_float64(
    skinny_gemm: SkinnyGemm, shape: tuple[int, int], rows: int, biased: bool
) -> None:
    out_features, size = shape
    weight = random(*shape) / size**0.5
    x, residual = random(rows, size), random(rows, out_features)
    bias = random(out_features) if biased else None
    norm = Norm(torch.rand(out_features, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5)
    exact = residual.double() + F.linear(
        x.double(), weight.double(), bias.double() if bias is not None else None
    )
    skinny_gemm.takes_sum(x, weight)  # waits for the compiler
    normed = skinny_gemm.add_linear(x, weight, bias, residual, norm)
    assert relative_error(residual, exact) < 3e-3
    assert normed.squares is not None
    mean = normed.squares.double().sum(1, keepdim=True) / out_features
    ours = normed.values.double() * (mean + norm.eps).rsqrt()
    exact_norm = exact * (exact.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert relative_error(ours, exact_norm) < 4e-3


def test_a_row_does_not_depend_on_its_neighbours(skinny_gemm: SkinnyGemm) -> None:
    """Only on whether its step has room for 8, 16 or 32, by which columns are shared out."""
    weight, x = random(512, 192), random(32, 192)
    for most, fewer in ((8, (2, 7)), (16, (9, 15)), (32, (17, 24))):
        whole = skinny_gemm.linear(Normed(x[:most]), weight, None)
        for rows in fewer:
            assert torch.equal(skinny_gemm.linear(Normed(x[:rows]), weight, None), whole[:rows])


@pytest.mark.parametrize("size", [2048, 4096])
def test_it_takes_up_to_32_rows(skinny_gemm: SkinnyGemm, size: int) -> None:
    weight = random(64, size)
    assert skinny_gemm.takes(Normed(random(32, size)), weight)
    assert not skinny_gemm.takes(Normed(random(33, size)), weight)


@pytest.mark.parametrize("rows", [8, 16, 24])
def test_a_captured_chain_equals_one_launched_by_one(skinny_gemm: SkinnyGemm, rows: int) -> None:
    """Each asks for its weights before the one before it has ended, and sends between blocks."""
    layers = [(random(2048, 512) / 23, random(512, 1024) / 32) for _ in range(8)]
    norm = Norm(random(512).abs(), 1e-5)
    x, residual = random(rows, 512), random(rows, 512)

    def run(residual: torch.Tensor, pause: bool) -> torch.Tensor:
        normed = Normed(x)
        for gate_up, down in layers:
            y = skinny_gemm.linear(normed, gate_up, None, gated=True)
            normed = skinny_gemm.add_linear(y, down, None, residual, norm)
            if pause:
                torch.cuda.synchronize()
        return normed.values

    skinny_gemm.takes(Normed(x), layers[0][0])  # waits for the compiler
    expected = run(residual.clone(), pause=True)
    graph, changed = torch.cuda.CUDAGraph(), residual.clone()
    with torch.cuda.graph(graph):
        captured = run(changed, pause=False)
    for _ in range(20):
        changed.copy_(residual)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


def test_what_it_does_not_take_has_its_factor() -> None:
    from asyncllm.models.layers.cuda_ops import CudaOps  # needs Triton

    x, odd = random(8, 512), random(60, 512) / 23
    normed = Normed(x, torch.rand(8, 32, device="cuda") * 512, 1e-5)
    exact = F.linear(normed.whole(), odd)
    torch.testing.assert_close(CudaOps(torch.device("cuda")).product(normed, odd), exact)
