"""cuBLAS's algorithms against torch's product, and a choice made, kept and captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from asyncllm.graphs.captured_times import captured_seconds
from asyncllm.kernels.gemm.cublas_lt import CublasLt, Shape
from asyncllm.kernels.gemm.gemm_autotune import AutotunedGemm, GemmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SHAPES = [
    Shape(512, 6144, 4096),
    Shape(768, 4096, 14336),
    Shape(128, 1024, 3072),
    Shape(24, 98, 256),
]


def operands(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape.num_tokens, shape.in_features, dtype=dtype, device=CUDA)
    weight = torch.randn(shape.out_features, shape.in_features, dtype=dtype, device=CUDA)
    return x, weight / shape.in_features**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_algorithms_give_torchs_product(shape: Shape, dtype: torch.dtype) -> None:
    library = CublasLt(dtype, CUDA)
    x, weight = operands(shape, dtype)
    algorithms = library.algorithms(shape)
    assert algorithms
    for algorithm in algorithms:
        assert library.can_run(shape, algorithm)
        ours = library.linear(x, weight, algorithm)
        torch.testing.assert_close(ours, F.linear(x, weight), atol=2e-2, rtol=2e-2)
    assert not library.can_run(shape, b"\xff" * 64)
    assert not library.can_run(shape, b"")


def test_a_choice_is_made_kept_and_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library, kept = CublasLt(torch.bfloat16, CUDA), GemmCache("this test")
    shape = Shape(768, 4096, 4096)
    x, weight = operands(shape, torch.bfloat16)
    products = AutotunedGemm(library, [shape.num_tokens], kept, captured_seconds)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = products.linear(x, weight)
        products.autotune()
        assert kept.load().keys() == {shape}
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        captured = products.linear(x, weight)
        graph.capture_end()
        x.neg_()
        graph.replay()
    stream.synchronize()
    torch.testing.assert_close(captured, -eager, atol=2e-2, rtol=2e-2)
    again = AutotunedGemm(library, [shape.num_tokens], kept, captured_seconds)
    torch.testing.assert_close(again.linear(x, weight), -eager, atol=2e-2, rtol=2e-2)
