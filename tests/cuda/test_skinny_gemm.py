"""GEMMs of few rows, their CUDA source run on the CPU (emulator.h), against float32."""

from __future__ import annotations

import shutil
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncllm.kernels.skinny_gemm import KERNEL, SkinnyGemm
from asyncllm.models.layers.ops import Norm, Normed
from tests.cuda.emulated import compile_for_cpu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

ROWS = [2, 8, 9, 17, 32]
SHAPES = [  # features, size, blocks
    (16, 64, 6),  # one unit, a quarter of a slice, which is one block's
    (40, 576, 2),  # a unit and a slice that are not full
    (72, 320, 4),  # a group that is all one block's
    (144, 1024, 4),  # several groups for each pair
    (208, 512, 6),
    (400, 576, 4),  # more tiles than one of the largest stages has
]


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("emulated") / "skinny_gemm.so"
    return compile_for_cpu(KERNEL, (), made)


def kernel_of(function: Any, num_blocks: int) -> SkinnyGemm:
    """On a device of so many blocks. Each launch has a seed of its own."""
    kernel, seeds = SkinnyGemm(torch.device("cpu")), count(1)
    kernel._launch = lambda args, blocks, stream: function(args, blocks, next(seeds))
    kernel._num_blocks = num_blocks
    return kernel


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_by_a_factor_and_with_a_bias(
    function: Any, shape: tuple[int, int, int], rows: int, gated: bool
) -> None:
    features, size, num_blocks = shape
    out_features = features * 2 if gated else features
    x, bias = random(rows, size), random(out_features)
    weight = (torch.randn(out_features, size) / size**0.5).bfloat16()
    normed = Normed(x, torch.rand(rows, 37) * size, 1e-5)
    factor = (normed.squares.sum(1, keepdim=True) / size + 1e-5).rsqrt()
    exact = F.linear(x.float(), weight.float()) * factor + bias.float()
    if gated:
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
    ours = kernel_of(function, num_blocks).linear(normed, weight, bias, gated)
    torch.testing.assert_close(ours.float(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_and_its_norm(function: Any, shape: tuple[int, int, int], rows: int) -> None:
    features, size, num_blocks = shape
    x, behind = random(rows, size), random(rows + 1, features)
    weight = (torch.randn(features, size) / size**0.5).bfloat16()
    norm = Norm(torch.rand(features).bfloat16() + 0.5, 1e-5)
    residual, last = behind[:-1], behind[-1].clone()
    exact = residual.float() + F.linear(x.float(), weight.float())
    normed = kernel_of(function, num_blocks).add_linear(x, weight, None, residual, norm)
    torch.testing.assert_close(residual.float(), exact, atol=2e-2, rtol=2e-2)
    assert torch.equal(behind[-1], last)  # nothing is written behind the rows
    assert normed.squares is not None
    torch.testing.assert_close(normed.squares.sum(1), residual.float().pow(2).sum(1))
    assert torch.equal(normed.values, (residual.float() * norm.weight.float()).bfloat16())
    whole = F.rms_norm(residual.float(), (features,), norm.weight.float(), norm.eps)
    torch.testing.assert_close(normed.whole().float(), whole, atol=2e-2, rtol=2e-2)


def test_a_row_does_not_depend_on_its_neighbours(function: Any) -> None:
    """Only on whether its step has room for 8, 16 or 32, by which columns are shared out."""
    weight, x = random(80, 320), random(32, 320)
    kernel = kernel_of(function, 4)
    for most, fewer in ((8, (2, 7)), (16, (9, 15)), (32, (17, 24))):
        whole = kernel.linear(Normed(x[:most]), weight, None)
        for rows in fewer:
            assert torch.equal(kernel.linear(Normed(x[:rows]), weight, None), whole[:rows])


@pytest.mark.slow
def test_nobody_overtakes_who_still_reads(function: Any) -> None:
    """Groups of one slice, which are soon over."""
    weight, x = random(320, 512), random(32, 512)
    kernel = kernel_of(function, 2)
    exact = x.float() @ weight.float().t()
    for _ in range(8):
        ours = kernel.linear(Normed(x), weight, None)
        torch.testing.assert_close(ours.float(), exact, atol=0.2, rtol=2e-2)


def test_it_takes_few_rows_of_what_it_divides() -> None:
    kernel = SkinnyGemm(torch.device("cpu"))
    small, x = random(64, 2048), random(33, 2048)
    assert not kernel.takes(Normed(x[:16]), small)  # no GPU that has it
    kernel._launch = lambda args, blocks, stream: 0
    assert kernel.takes(Normed(x[:2]), small) and kernel.takes(Normed(x[:32]), small)
    assert not kernel.takes(Normed(x[:1]), small) and not kernel.takes(Normed(x), small)
    assert not kernel.takes(Normed(x[:8].float()), small)
    assert not kernel.takes(Normed(x[:8]), random(60, 2048))
    assert not kernel.takes(Normed(random(8, 96)), random(64, 96))
    assert not kernel.takes(Normed(x[:8], torch.ones(8, 1)), random(60, 2048))
    assert not kernel.takes(Normed(x[:8]), torch.empty(128256, 2048, device="meta"))
    assert kernel.takes_sum(x[:32], random(2048, 2048))
    assert not kernel.takes_sum(x[:8], random(1000, 2048))  # the next product's columns


def test_what_does_not_run_is_not_used() -> None:
    kernel = SkinnyGemm(torch.device("cpu"))
    kernel._loading = lambda: lambda args, blocks, stream: 98
    assert not kernel.takes(Normed(random(8, 64)), random(64, 64))
    assert kernel._launch is None and kernel._loading is None
