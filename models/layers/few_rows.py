"""Products of 2 to 16 rows by one CUDA kernel, with what comes before and after them.

What one_row.py does for one row, for as many as the tensor cores take at a time: at so few rows a
product is a read of its weights, and what it costs besides is latency. SiLU, the addition to the
residual and the next norm happen in the product, and its weights are asked for before the kernel
before it has ended. It pays where weights are small; large ones cuBLAS reads faster (docs/LOG.md).
The kernel, few_rows.cu, is compiled while the model loads, if no start before has done so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncllm.attention import cuda_source
from asyncllm.attention.programmatic_launch import has_programmatic_launch
from asyncllm.models.layers.ops import Norm, Normed

SOURCE = Path(__file__).parent.parent / "cuda" / "few_rows.cu"
MAX_ROWS = 16
MAX_HIDDEN_SIZE = 2048  # 1024: steps a quarter faster, 4096: slower; between not measured
MAX_WEIGHTS = 1 << 25  # of a product; the LM head is cuBLAS's
FEATURES = 16  # outputs of one block of the kernel
COLUMNS = 32  # of one load: a multiple of it is a product's size
POINTERS, INTS = 8, 5


class FewRows:
    """Some of `Ops`, for tensors that it `takes`; none on a card before Hopper."""

    def __init__(self, device: torch.device) -> None:
        self._loading: Callable[[], ctypes.CDLL | None] | None = None
        self._launch_kernel: Any = None
        if has_programmatic_launch(device):
            capability = torch.cuda.get_device_capability(device)
            self._loading = cuda_source.begin_loading(SOURCE, capability)

    def takes(self, x: Normed, weight: torch.Tensor) -> bool:
        """For `linear`: x [rows, hidden_size]; always where `add_linear` left a factor to come."""
        return x.squares is not None or self._takes(x.values, weight, x.values.shape[1])

    def takes_sum(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """For `add_linear`: x [rows, size], weight [hidden_size, size]."""
        return self._takes(x, weight, weight.shape[0])

    def _takes(self, x: torch.Tensor, weight: torch.Tensor, hidden_size: int) -> bool:
        return (
            1 < x.shape[0] <= MAX_ROWS
            and hidden_size <= MAX_HIDDEN_SIZE
            and weight.numel() <= MAX_WEIGHTS
            and hidden_size % COLUMNS == 0
            and x.shape[1] % COLUMNS == 0
            and x.dtype is torch.bfloat16
            and self._is_ready()
        )

    def _is_ready(self) -> bool:
        """Waits for the compiler, once."""
        if self._loading is not None:
            library, self._loading = self._loading(), None
            if library is not None:
                function = library.asyncllm_few_rows
                pointer, integer = ctypes.c_void_p, ctypes.c_int
                function.argtypes = [pointer] * POINTERS + [integer] * INTS
                function.argtypes += [ctypes.c_float, pointer]
                self._launch_kernel = function
        return self._launch_kernel is not None

    def linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> torch.Tensor:
        """`Ops.linear`, or `Ops.gated_linear`."""
        out_features = weight.shape[0] // 2 if gated else weight.shape[0]
        out = x.values.new_empty((x.values.shape[0], out_features))
        self._launch(x, weight, bias, out, gated=gated)
        return out

    def add_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        """`Ops.add_linear`."""
        scaled = torch.empty_like(residual)
        num_blocks = -(-residual.shape[1] // FEATURES)
        squares = residual.new_empty((residual.shape[0], num_blocks), dtype=torch.float32)
        self._launch(
            Normed(x), weight, bias, residual, norm=norm.weight, scaled=scaled, squares=squares
        )
        return Normed(scaled, squares, norm.eps)

    def _launch(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        gated: bool = False,
        norm: torch.Tensor | None = None,
        scaled: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
    ) -> None:
        num_rows, size = x.values.shape
        tensors = (x.values, x.squares, weight, bias, norm, out, scaled, squares)
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
        error = self._launch_kernel(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            num_rows,
            out.shape[1],
            size,
            0 if x.squares is None else x.squares.shape[1],
            gated,
            x.eps,
            torch.cuda.current_stream(out.device).cuda_stream,
        )
        if error:
            raise RuntimeError(f"few_rows: CUDA error {error}")
