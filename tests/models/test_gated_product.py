"""The choice between our gated product and cuBLAS's with SwiGLU, with a library of the test."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from asyncllm.attention import cuda_source
from asyncllm.models.layers import gated_product
from asyncllm.models.layers.cublas_lt import ALGORITHM_BYTES, Shape
from asyncllm.models.layers.gated_product import OURS, Args, GatedAlgorithms, GatedProduct
from asyncllm.models.layers.kept_choices import KeptChoices

OTHER = b"x" * ALGORITHM_BYTES
SHAPE = Shape(128, 8192, 4096)
KernelOf = Callable[[object], GatedProduct]


class Library:
    def algorithms(self, shape: Shape) -> list[bytes]:
        return [OTHER]

    def can_run(self, shape: Shape, algorithm: bytes) -> bool:
        return algorithm == OTHER

    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes) -> torch.Tensor:
        assert algorithm == OTHER
        return F.linear(x, weight)


def halves(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def launch(args: object, num_blocks: int, stream: int) -> int:
    return 0


@pytest.fixture
def kernel_of(monkeypatch: pytest.MonkeyPatch) -> KernelOf:
    """The kernel on a card of the test, where the compiler makes this launch of it."""

    class Card:
        multi_processor_count = 2

    def kernel_of(launch: object) -> GatedProduct:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
        monkeypatch.setattr(cuda_source, "begin_loading_launch", lambda *args: lambda: launch)
        kernel = GatedProduct(torch.device("cuda"), torch.bfloat16)
        kernel._device = torch.device("cpu")  # where it is tried
        return kernel

    return kernel_of


@pytest.mark.parametrize(
    ("shape", "takes"),
    [
        (SHAPE, True),
        (Shape(1, 6144, 1024), True),  # whether it is quicker is measured
        (Shape(128, 28672, 4096 + 32), False),
        (Shape(128, 28672 + 8, 4096), False),
    ],
)
def test_the_kernel_takes_what_its_tiles_divide(
    kernel_of: KernelOf, shape: Shape, takes: bool
) -> None:
    algorithms = GatedAlgorithms(Library(), kernel_of(launch), halves)
    assert algorithms.algorithms(shape) == ([OTHER, OURS] if takes else [OTHER])
    assert algorithms.can_run(shape, OURS) is takes
    assert algorithms.can_run(shape, OTHER)


def test_without_a_compiler_there_are_cublass_alone(kernel_of: KernelOf) -> None:
    algorithms = GatedAlgorithms(Library(), kernel_of(None), halves)
    assert algorithms.algorithms(SHAPE) == [OTHER]
    assert not algorithms.can_run(SHAPE, OURS)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float16), ("cuda", torch.float32)]
)
def test_elsewhere_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not GatedProduct(torch.device(device), dtype).takes(SHAPE)


def test_nothing_is_compiled_for_another_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not gated_product.supports(torch.device("cuda"), torch.bfloat16)


def test_each_way_is_run_and_behind_cublass_comes_swiglu(kernel_of: KernelOf) -> None:
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    algorithms = GatedAlgorithms(Library(), kernel_of(launch), halves)
    assert torch.equal(algorithms.linear(x, weight, OTHER), halves(F.linear(x, weight)))
    assert algorithms.can_run(SHAPE, OURS)
    assert algorithms.linear(x, weight, OURS).shape == (4, 16)


def test_an_error_of_the_launch_is_raised(kernel_of: KernelOf) -> None:
    errors = iter([0, 1])
    kernel = kernel_of(lambda args, num_blocks, stream: next(errors))
    assert kernel.takes(SHAPE)
    with pytest.raises(RuntimeError, match="gated_product: CUDA error 1"):
        kernel(torch.ones(4, 64), torch.ones(32, 64))


def test_a_kernel_that_does_not_run_here_is_not_used(
    kernel_of: KernelOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor where a start before has chosen it."""
    algorithms = GatedAlgorithms(Library(), kernel_of(lambda args, num_blocks, stream: -1), halves)
    with caplog.at_level("INFO", logger="asyncllm"):
        assert not algorithms.can_run(SHAPE, OURS)
    assert algorithms.algorithms(SHAPE) == [OTHER]
    assert "left to cuBLAS: gated_product: CUDA error -1" in caplog.text


def test_what_was_measured_with_another_source_or_without_a_compiler_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = torch.device("cuda")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_source, "find_compiler", lambda: None)
    versions = {gated_product.kernel_version(device, torch.bfloat16)}
    monkeypatch.setattr(cuda_source, "find_compiler", lambda: "/bin/true")
    versions.add(gated_product.kernel_version(device, torch.bfloat16))
    other = tmp_path / "gated_product.cu"
    other.write_text("another")
    monkeypatch.setattr(gated_product, "SOURCE", other)
    versions.add(gated_product.kernel_version(device, torch.bfloat16))
    assert len(versions) == 3 and "" in versions
    assert gated_product.kernel_version(torch.device("cpu"), torch.bfloat16) == ""


def test_our_kernel_can_be_a_kept_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    KeptChoices("a card").save({SHAPE: OURS})
    assert KeptChoices("a card").load() == {SHAPE: OURS}


def test_the_arguments_are_as_large_as_the_kernels() -> None:
    assert ctypes.sizeof(Args) == 3 * 8 + 3 * 4 + 4  # three addresses, three numbers, their end
