"""Kernels between the GEMMs of many rows, in Triton: RMSNorm with its addition, and SwiGLU.

There cuBLAS multiplies, and nothing of this fits into its kernels. Each is one pass over its rows,
bound by memory and, where rows are few, by the gap before it, which a programmatic launch shortens.
So a norm for a product that takes bytes is quantised on its way out, as `quantize_rows` would.
Arithmetic is in float32. A norm is that of the sum as it is stored, as elsewhere. Other sizes of
programs, several rows to one of them, and asking for the residual before the wait were not faster
(docs/log/gemm.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from asyncllm.kernels.all_reduce import RowSums
from asyncllm.kernels.all_reduce.kernel import sum_of_ranks
from asyncllm.kernels.declaration import Start
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.quant_gemm.matrix import LARGEST, empty_bytes, quantize_row
from asyncllm.kernels.records import Norm

COLUMNS_PER_WARP = 512  # of a norm: 16 numbers to a thread
MAX_NORM_WARPS = 16
SWIGLU_COLUMNS = 1024  # of a program
SWIGLU_WARPS = 4
MANY_ROWS = 128  # more than skinny_gemm takes


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, bytes_ptr, scale_ptr, peers_ptr, calls_ptr, rank, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr,
    MOST: tl.constexpr, INTEGER: tl.constexpr, RANKS: tl.constexpr, TWO_SHOTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row to a program. ADD: of the sum with the residual, which becomes the sum. MOST: the
    largest number of the type in which `bytes` gets it, too, with a scale; None: it does not.
    RANKS: x is the sum of that many ranks' x."""
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
        if ADD:
            residual_ptr += after
        if MOST is not None:
            bytes_ptr += after
            scale_ptr += after
        if RANKS > 1:
            calls_ptr += after
    row = tl.program_id(0)
    at = row.to(tl.int64) * SIZE + column
    if RANKS > 1:
        x = sum_of_ranks(x_ptr, peers_ptr, calls_ptr, row, rank, SIZE, BLOCK, RANKS, TWO_SHOTS)
    else:
        x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, rounded, inside)
        x = rounded.to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = (x * factor * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, normed, inside)
    if MOST is not None:
        made, scale = quantize_row(normed.to(tl.float32), MOST, INTEGER)
        tl.store(bytes_ptr + at, made.to(bytes_ptr.dtype.element_ty), inside)
        tl.store(scale_ptr + row, scale)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A piece of a row to a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
    gate_ptr = x_ptr + row * (2 * SIZE) + column
    gate = tl.load(gate_ptr, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, inside, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _swiglu_in_bytes_kernel(
    x_ptr, out_ptr, bytes_ptr, scale_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, INTEGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row to a program, which has one scale."""
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
        bytes_ptr += after
        scale_ptr += after
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(x_ptr + row * (2 * SIZE) + column, inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * SIZE) + SIZE + column, inside, other=0.0).to(tl.float32)
    out = (gate / (1 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
    at = row * SIZE + column
    tl.store(out_ptr + at, out, inside)
    made, scale = quantize_row(out.to(tl.float32), MOST, INTEGER)
    tl.store(bytes_ptr + at, made.to(bytes_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + tl.program_id(0), scale)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """`Ops.rms_norm`."""
    out = torch.empty_like(x)
    _launch_norm(x, None, norm, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, sums: RowSums | None = None
) -> None:
    """In place: residual [T, size] += x [T, size], and x becomes the norm of the sum. `sums`: of
    all ranks' x."""
    _launch_norm(x, residual, norm, x, None, sums)


def add_rms_norm_in_bytes(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, sums: RowSums | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; and `quantize_rows` of that norm, to the last bit, in `norm.in_bytes`."""
    assert norm.in_bytes is not None
    made = empty_bytes(x, norm.in_bytes)
    _launch_norm(x, residual, norm, x, made, sums)
    return made


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu of a row's first half, times the second: x [T, 2 * size] -> [T, size], a new tensor."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty((num_rows, size))
    _swiglu_kernel[(num_rows, triton.cdiv(size, SWIGLU_COLUMNS))](
        x, out, SIZE=size, BLOCK=SWIGLU_COLUMNS, num_warps=SWIGLU_WARPS, **launch_flags(x.device)
    )
    return out


def swiglu_in_bytes(
    x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """`swiglu`; and `quantize_rows` of it, to the last bit."""
    size = x.shape[1] // 2
    out = x.new_empty((len(x), size))
    made = empty_bytes(out, dtype)
    block = triton.next_power_of_2(size)
    _swiglu_in_bytes_kernel[(len(x),)](
        x, out, *made, SIZE=size, BLOCK=block, MOST=LARGEST[dtype], INTEGER=dtype == torch.int8,
        num_warps=max(1, min(block // COLUMNS_PER_WARP, MAX_NORM_WARPS)), **launch_flags(x.device),
    )  # fmt: skip
    return out, made


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    in_bytes: tuple[torch.Tensor, torch.Tensor] | None,
    sums: RowSums | None = None,
) -> None:
    assert x.is_contiguous() and out.is_contiguous()
    made, scales = (None, None) if in_bytes is None else in_bytes
    block = triton.next_power_of_2(x.shape[1])
    _norm_kernel[(x.shape[0],)](
        x, residual, norm.weight, out, made, scales,
        *((None, None, 0) if sums is None else (sums.peers, sums.calls, sums.rank)), norm.eps,
        SIZE=x.shape[1], BLOCK=block, ADD=residual is not None, CENTERED=norm.centered,
        MOST=None if made is None else LARGEST[made.dtype],
        INTEGER=made is not None and made.dtype == torch.int8,
        RANKS=1 if sums is None else sums.num_ranks,
        TWO_SHOTS=sums is not None and sums.in_two_shots,
        num_warps=max(1, min(block // COLUMNS_PER_WARP, MAX_NORM_WARPS)),
        **launch_flags(x.device),
    )  # fmt: skip


def prewarm(start: Start) -> Iterator[Callable[[], object]]:
    if not start.has_fast_ops:
        return
    hidden, intermediate = start.sizes.hidden_size, start.sizes.intermediate_size

    def rows(size: int) -> torch.Tensor:
        return start.zeros(MANY_ROWS, size, dtype=start.dtype)

    def norm() -> Norm:
        return Norm(start.zeros(hidden, dtype=start.dtype), 1.0)

    yield lambda: rms_norm(rows(hidden), norm())
    yield lambda: add_rms_norm(rows(hidden), rows(hidden), norm())
    yield lambda: swiglu(rows(2 * intermediate))
