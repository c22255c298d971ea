"""GEMMs of 2 to 32 rows by one CUDA kernel, with what comes before and after them.

What gemv does for one row, for as many as it pays: at so few rows a product is a read of its
weights, and what it costs besides is latency. SiLU, the addition to the residual and the next norm
happen in the product, and its weights are asked for before the kernel before it has ended. The
kernel, skinny_gemm.cu, is compiled while the model loads, if no start before has done so.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from asyncllm.kernels.declaration import CudaKernel, Launch, current_stream, num_sms
from asyncllm.kernels.records import Norm, Normed

logger = logging.getLogger("asyncllm")

MAX_ROWS = 32  # beyond, cuBLAS reads weights as fast (docs/log/gemm.md)
MAX_FEATURES = 1 << 16  # of a product; the LM head is cuBLAS's
COLUMNS = 64  # of a product's size a multiple
FEATURES = 8  # of its outputs
UNIT = 16  # outputs whose squares are one sum

_pointer, _int32 = ctypes.c_void_p, ctypes.c_int32


class Args(ctypes.Structure):
    """The kernel's, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("x", "squares", "weight", "bias", "next_norm")),
        *((name, _pointer) for name in ("out", "scaled", "next_squares")),
        *((name, _int32) for name in ("rows", "features", "size", "num_squares", "gated")),
        ("eps", ctypes.c_float),
    )


KERNEL = CudaKernel(
    name="skinny_gemm",
    falls_back_to="cuBLAS",
    source=Path(__file__).with_name("skinny_gemm.cu"),
    structs=(Args,),
    capabilities=((9, 0), (10, 0), (10, 3)),  # with 227 KiB of shared memory for a block
    definitions_for=lambda start: () if start.has_fast_ops else None,
)


class SkinnyGemm:
    """Some of `Ops`, for tensors that it `takes`.

    No engine fails to start for a faster kernel: where it is not compiled, or cannot be launched,
    and on GPUs with less shared memory, it takes none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loading: Callable[[], Launch | None] | None = None
        self._launch: Launch | None = None
        self._num_blocks = 0
        if KERNEL.supports(device):
            self._loading = KERNEL.begin_loading(device)
            self._num_blocks = num_sms(device)

    def takes(self, x: Normed, weight: torch.Tensor) -> bool:
        """For `Ops.product` and `Ops.product_swiglu`: x [rows, size]."""
        return self._takes(x.values, weight)

    def takes_sum(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """For `Ops.product_add_rms_norm`: x [rows, size], weight [hidden_size, size]."""
        return weight.shape[0] % COLUMNS == 0 and self._takes(x, weight)

    def _takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return (
            1 < x.shape[0] <= MAX_ROWS
            and x.shape[1] % COLUMNS == 0
            and weight.shape[0] % FEATURES == 0
            and weight.shape[0] <= MAX_FEATURES
            and x.dtype is torch.bfloat16
            and self._is_ready()
        )

    def _is_ready(self) -> bool:
        """Waits for the compiler, and launches the kernel once, at the first call."""
        if self._loading is not None:
            self._launch, self._loading = self._loading(), None
            if self._launch is not None:
                tried = torch.ones(FEATURES, COLUMNS, dtype=torch.bfloat16, device=self._device)
                try:
                    self.linear(Normed(tried), tried, None)
                except RuntimeError as error:  # it says whose
                    logger.info("falling back to %s: %s", KERNEL.falls_back_to, error)
                    self._launch = None
        return self._launch is not None

    def agree(self, least: Callable[[int], int]) -> None:
        """Take nothing where another rank cannot. least: over all ranks, which all call this."""
        if not least(int(self._is_ready())):
            self._launch = None

    def linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> torch.Tensor:
        """`Ops.product`, or `Ops.product_swiglu`."""
        out_features = weight.shape[0] // 2 if gated else weight.shape[0]
        out = x.values.new_empty((x.values.shape[0], out_features))
        self._run(x, weight, bias, out, gated=gated)
        return out

    def add_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        """`Ops.product_add_rms_norm`."""
        scaled = torch.empty_like(residual)
        num_units = -(-residual.shape[1] // UNIT)
        squares = residual.new_empty((residual.shape[0], num_units), dtype=torch.float32)
        self._run(
            Normed(x), weight, bias, residual, norm=norm.weight, scaled=scaled, squares=squares
        )
        return Normed(scaled, squares, norm.eps)

    def _run(
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
        tensors = (x.values, x.squares, weight, bias, norm, out, scaled, squares)  # as in `Args`
        assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
        args = Args(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            num_rows,
            out.shape[1],
            size,
            0 if x.squares is None else x.squares.shape[1],
            gated,
            x.eps,
        )
        assert self._launch is not None, "called without having been asked"
        KERNEL.launch(self._launch, args, self._num_blocks, current_stream(out))
