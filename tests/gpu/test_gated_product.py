"""The gated product against torch's, alone, captured, and behind a kernel that writes its input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncllm.models.layers.cublas_lt import Shape
from asyncllm.models.layers.gated_product import GatedProduct, supports

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not supports(CUDA, torch.bfloat16),
        reason="needs a card with tensor cores like Hopper's",
    ),
]
ROWS = (1, 17, 64, 128, 129, 256, 512, 528, 640, 768, 1000)
# features, size
SIZES = [(14336, 4096), (3072, 1024), (1000, 448), (8, 64)]


@pytest.fixture(scope="module")
def product() -> GatedProduct:
    product = GatedProduct(CUDA, torch.bfloat16)
    if not product.takes(Shape(128, 8192, 4096)):
        pytest.skip("no compiler")
    return product


def operands(rows: int, features: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, size, device=CUDA).bfloat16()
    weight = torch.randn(2 * features, size, device=CUDA) / size**0.5
    return x, weight.bfloat16()


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x.float(), weight.float()).bfloat16().float().chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_silu_of_one_product_times_the_other(
    product: GatedProduct, rows: int, sizes: tuple[int, int]
) -> None:
    x, weight = operands(rows, *sizes)
    torch.testing.assert_close(
        product(x, weight).float(), expected(x, weight), atol=2e-2, rtol=2e-2
    )


def test_it_equals_torchs_product_of_the_same_numbers(product: GatedProduct) -> None:
    """Whole numbers whose sums bf16 has: no rounding can hide a wrong place."""
    x = torch.randint(-1, 2, (200, 64), device=CUDA).bfloat16()
    weight = torch.randint(-1, 2, (480, 64), device=CUDA).bfloat16()
    gate, up = F.linear(x, weight).float().chunk(2, dim=1)
    torch.testing.assert_close(
        product(x, weight), (gate / (1 + torch.exp(-gate)) * up).bfloat16(), atol=0, rtol=1e-2
    )


def test_captured_it_waits_for_the_kernel_before(product: GatedProduct) -> None:
    """A chain, replayed with other numbers."""
    x, weight = operands(640, 1024, 1024)
    weight /= 4  # or the chain explodes
    other = weight.flip(0).contiguous()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product(x, weight)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = x
        for i in range(40):
            out = product(out, other if i % 2 else weight) + x
        graph.capture_end()
        for _ in range(3):
            x.normal_()
            graph.replay()
            want = x
            for i in range(40):
                want = (expected(want, other if i % 2 else weight).bfloat16() + x).bfloat16()
            torch.testing.assert_close(out.float(), want.float(), atol=5e-2, rtol=5e-2)
