"""Products of 2 to 16 rows against float64: odd shapes, biases, all that is fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from asyncllm.models.layers.ops import Norm, Normed

if TYPE_CHECKING:
    from asyncllm.models.layers.few_rows import FewRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# with a bias, gated, parts of the squares (0: no factor to come)
VARIANTS = [(False, False, 0), (True, False, 37), (False, True, 1), (True, True, 37)]
SHAPES = [(4096, 1024), (1024, 3072), (512, 192), (98, 256), (34, 96), (1030, 32)]
ROWS = [2, 5, 8, 9, 16]


@pytest.fixture(scope="module")
def few_rows() -> FewRows:
    from asyncllm.models.layers.few_rows import FewRows  # needs Triton

    return FewRows(torch.device("cuda"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64(few_rows: FewRows, shape: tuple[int, int], rows: int) -> None:
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
        few_rows.takes(normed, weight)  # waits for the compiler
        ours = few_rows.linear(normed, weight, bias, gated)
        assert relative_error(ours, exact) < 4e-3, (biased, gated, parts)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 32 == 0])
def test_the_sum_and_its_norm_equal_float64(
    few_rows: FewRows, shape: tuple[int, int], rows: int, biased: bool
) -> None:
    out_features, size = shape
    if out_features > 2048:
        pytest.skip("cuBLAS takes it")
    weight = random(*shape) / size**0.5
    x, residual = random(rows, size), random(rows, out_features)
    bias = random(out_features) if biased else None
    norm = Norm(torch.rand(out_features, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5)
    exact = residual.double() + F.linear(
        x.double(), weight.double(), bias.double() if bias is not None else None
    )
    assert few_rows.takes_sum(x, weight)
    normed = few_rows.add_linear(x, weight, bias, residual, norm)
    assert relative_error(residual, exact) < 3e-3
    assert normed.squares is not None
    mean = normed.squares.double().sum(1, keepdim=True) / out_features
    ours = normed.values.double() * (mean + norm.eps).rsqrt()
    exact_norm = exact * (exact.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert relative_error(ours, exact_norm) < 4e-3


def test_a_row_does_not_depend_on_its_neighbours(few_rows: FewRows) -> None:
    weight, x = random(512, 192), random(16, 192)
    whole = few_rows.linear(Normed(x), weight, None)
    for rows in (2, 8, 9):
        assert torch.equal(few_rows.linear(Normed(x[:rows]), weight, None), whole[:rows])


def test_large_and_odd_products_are_left_to_others(few_rows: FewRows) -> None:
    meta = torch.device("meta")
    head = torch.empty(151936, 1024, device=meta)
    x = torch.empty(8, 1024, dtype=torch.bfloat16, device=meta)
    assert not few_rows.takes(Normed(x), head)
    assert not few_rows.takes(Normed(x[:1]), head[:64])
    assert not few_rows.takes(Normed(x.repeat(3, 1)), head[:64])
    assert not few_rows.takes(Normed(x.half()), head[:64])
    assert not few_rows.takes_sum(x, head[:4096])
    assert not few_rows.takes_sum(x, head[:40])
