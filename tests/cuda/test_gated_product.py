"""The gated product, its CUDA source run on the CPU (emulator.h), against float32."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncllm.models.layers.gated_product import SOURCE, Args
from tests.cuda.emulated import compile_for_cpu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("emulated") / "gated.so"
    return compile_for_cpu(SOURCE, "asyncllm_gated_product", (), made)


# Blocks beside the tiles: fewer, as many, more.
@pytest.mark.parametrize("num_blocks", [2, 4, 20])
@pytest.mark.parametrize(
    ("rows", "features", "size"),
    [
        (1, 8, 64),
        (100, 112, 128),  # a tile, fewer slices than stages; a pair with nothing for one
        (128, 240, 512),  # side by side, the last pair not full
        (129, 120, 448),  # below each other
        (300, 232, 384),  # three below each other, side by side in pairs
    ],
)
def test_it_is_silu_of_one_product_times_the_other(
    function: Any, rows: int, features: int, size: int, num_blocks: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, size).bfloat16()
    weight = (torch.randn(2 * features, size) / size**0.5).bfloat16()
    out = torch.full((rows + 1, features), torch.nan, dtype=torch.bfloat16)
    args = Args(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, features, size)
    assert function(ctypes.byref(args), num_blocks, num_blocks) == 0  # the seed, too
    gate, up = F.linear(x.float(), weight.float()).bfloat16().float().chunk(2, dim=1)
    torch.testing.assert_close(out[:-1].float(), F.silu(gate) * up, atol=2e-2, rtol=2e-2)
    assert out[-1].isnan().all()  # nothing is written behind the rows
