"""silu(gate) * up of many rows in one kernel, and the choice between it and cuBLAS with SwiGLU.

What a product of gate and up writes, a kernel after it reads again: 44 MB a layer of an 8B model at
768 tokens. The kernel here, gated_product.cu, multiplies about as quickly as cuBLAS does, keeps
both in registers and writes their SwiGLU alone. It pays where steps are large; which is quicker at
how many tokens is measured (products.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from asyncllm.attention import cuda_source
from asyncllm.models.layers.cublas_lt import ALGORITHM_BYTES, Shape
from asyncllm.models.layers.products import Algorithms
from asyncllm.models.layers.tried_kernel import TriedKernel

SOURCE = Path(__file__).parent.parent / "cuda" / "gated_product.cu"
CAPABILITY = (9, 0)  # whose tensor cores it is written for
COLUMNS = 64  # of a product's columns a multiple
FEATURES = 8  # of its outputs
OURS = b"gated_product.cu".ljust(ALGORITHM_BYTES, b"\0")  # among cuBLAS's algorithms

_pointer, _int32 = ctypes.c_void_p, ctypes.c_int32


class Args(ctypes.Structure):
    """The kernel's `Request`, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "weight", "out")),
        *((name, _int32) for name in ("rows", "features", "size")),
    )


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) == CAPABILITY


def kernel_version(device: torch.device, dtype: torch.dtype) -> str:
    """Of the kernel that a start can use, for what is measured with it; "" where it has none."""
    if not supports(device, dtype):
        return ""
    try:
        library = cuda_source.path_of(SOURCE, CAPABILITY)
        return library.stem if library.exists() or cuda_source.find_compiler() else ""
    except (OSError, RuntimeError):  # no home, not ours to look into
        return ""


class GatedProduct:
    """The kernel, for products that it `takes`; compiled meanwhile where no start did it before."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device if supports(device, dtype) else torch.device("cpu")
        self._kernel = TriedKernel(SOURCE, "asyncllm_gated_product", self._device)

    def takes(self, shape: Shape) -> bool:
        """Waits for the compiler, once."""
        return (
            self._kernel.is_ready(self._try)
            and shape.in_features % COLUMNS == 0
            and shape.out_features % (2 * FEATURES) == 0
        )

    def _try(self) -> None:
        tried = torch.ones(2 * FEATURES, COLUMNS, dtype=torch.bfloat16, device=self._device)
        self(tried, tried)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [rows, size], weight [2 * features, size], both contiguous -> [rows, features], new.

        Capturable. Raises `RuntimeError` where the device does not take it.
        """
        out = x.new_empty((x.shape[0], weight.shape[0] // 2))
        args = Args(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *out.shape, x.shape[1])
        self._kernel.run(args, out)
        return out


class GatedAlgorithms:
    """Our kernel, and cuBLAS's algorithms with SwiGLU behind each, as `Algorithms`."""

    def __init__(
        self,
        library: Algorithms,
        kernel: GatedProduct,
        swiglu: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`swiglu`: many_rows.py has it, and its Triton."""
        self._library = library
        self._kernel = kernel
        self._swiglu = swiglu

    def algorithms(self, shape: Shape) -> list[bytes]:
        ours = [OURS] if self._kernel.takes(shape) else []
        return [*self._library.algorithms(shape), *ours]

    def can_run(self, shape: Shape, algorithm: bytes) -> bool:
        if algorithm == OURS:
            return self._kernel.takes(shape)
        return self._library.can_run(shape, algorithm)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes) -> torch.Tensor:
        """silu(gate) * up: [T, size] -> [T, features]."""
        if algorithm == OURS:
            return self._kernel(x, weight)
        return self._swiglu(self._library.linear(x, weight, algorithm))
