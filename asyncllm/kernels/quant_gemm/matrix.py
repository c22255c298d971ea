"""A quantised matrix as kernels take it, the same in 16 bits, and rows of activations in 8.

The form is models/quantization/scheme.py's; words.py says how codes of four bits lie in words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.quant_gemm.product import BYTES, FP4, INT4, PLAIN, TABLE
from asyncllm.kernels.quant_gemm.words import CHUNK

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Rows of which more are multiplied in this type, by cuBLAS; for fewer 16 bits take as long.
MOST_IN_16_BITS = {torch.float8_e4m3fn: 32, torch.int8: 128}
FORMATS = {"fp8": BYTES, "int8": BYTES, "int4": INT4, "fp4": FP4, "nf4": TABLE}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [features, columns], which may be those of several experts.

    weight: e4m3 or int8 [features, columns], or int32 words [features, chunks * WORDS], of which
    rows that fill the last tile lie behind it. scale,
    offset: [features, groups]; or scale int32 [features, chunks], of four groups' exponents each
    (e8m0). table: float32 [16], the values of the codes of four bits but int4's. group: columns
    that share a scale, a multiple of CHUNK or 16, 32 or 64; None: all.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    table: torch.Tensor | None
    bias: torch.Tensor | None
    group: int | None
    columns: int
    format: int

    @property
    def is_packed(self) -> bool:
        return self.format >= INT4

    @property
    def is_e8m0(self) -> bool:
        return self.scale.dtype == torch.int32


def plain_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Quantized:
    """[features, columns] in 16 bits, for kernels that take any format."""
    return Quantized(weight, weight, None, None, bias, None, weight.shape[1], PLAIN)


def block_of(matrix: Quantized, most: int) -> int:
    """Columns that a product takes at a time: of one group, where there are groups."""
    if matrix.is_packed:
        return CHUNK
    block = most
    while matrix.group is not None and matrix.group % block:
        block //= 2
    return block


def is_fast(x: torch.Tensor, matrix: Quantized) -> bool:
    """Codes become numbers by instructions of a GPU, in bfloat16, and not by a table."""
    return x.is_cuda and x.dtype == torch.bfloat16 and matrix.format in (INT4, FP4)


@triton.jit
def _matrix_kernel(
    weight_ptr, scale_ptr, offset_ptr, table_ptr, out_ptr, out_features,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    E8M0: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)[:, None].to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (feature < out_features) & (column < WIDTH)
    chunks: tl.constexpr = (WIDTH + 127) // 128
    if FORMAT >= 2:
        tile = feature // 8 * (chunks * 128) + feature % 8 * 16
        word_at = tile + column // 128 * 128 + column % 16
        word = tl.load(weight_ptr + word_at, mask, other=0)
        code = (word >> (column % 128 // 16 * 4)) & 15
        value = code.to(tl.float32) - 8.0 if FORMAT == 2 else tl.load(table_ptr + code)
    else:
        value = tl.load(weight_ptr + feature * WIDTH + column, mask, other=0.0).to(tl.float32)
    if E8M0:
        exponents = tl.load(scale_ptr + feature * chunks + column // 128, mask, other=0)
        bits = ((exponents >> (column % 128 // 32 * 8)) & 255) << 23
        value *= bits.to(tl.float32, bitcast=True)
    else:
        groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        group = feature * groups + column // GROUP
        value *= tl.load(scale_ptr + group, mask, other=0.0).to(tl.float32)
        if OFFSET:
            value += tl.load(offset_ptr + group, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + feature * WIDTH + column, value.to(out_ptr.dtype.element_ty), mask)


def dequantize(matrix: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in 16 bits, [features, columns], a new tensor."""
    features = len(matrix.weight)
    out = torch.empty((features, matrix.columns), dtype=dtype, device=matrix.weight.device)
    _matrix_kernel[(triton.cdiv(features, 4), triton.cdiv(matrix.columns, 1024))](
        matrix.weight, matrix.scale, matrix.offset, matrix.table, out, features,
        WIDTH=matrix.columns, GROUP=matrix.group or matrix.columns, FORMAT=matrix.format,
        OFFSET=matrix.offset is not None, E8M0=matrix.is_e8m0, FEATURES=4, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def quantize_row(x, MOST: tl.constexpr, INTEGER: tl.constexpr):
    """A row's numbers in float32 by its largest one, not yet in their type, and its scale."""
    most = tl.max(tl.abs(x), axis=0)
    scale = tl.where(most > 0, most / MOST, 1.0)
    made = x / scale
    if INTEGER:
        made = tl.where(made < 0, tl.ceil(made - 0.5), tl.floor(made + 0.5))
    return made, scale


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    INTEGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row to a program. MOST: the largest number of the type."""
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
        scale_ptr += after
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    made, scale = quantize_row(x, MOST, INTEGER)
    tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + tl.program_id(0), scale)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, size] as e4m3 or int8 by each row's largest number, and the scales, float32 [T, 1]."""
    out, scales = empty_bytes(x, dtype)
    block = triton.next_power_of_2(x.shape[1])
    _quantize_kernel[(len(x),)](
        x, out, scales, SIZE=x.shape[1], BLOCK=block, MOST=LARGEST[dtype],
        INTEGER=dtype == torch.int8, num_warps=max(1, min(block // 512, 16)),
        **launch_flags(x.device),
    )  # fmt: skip
    return out, scales


def empty_bytes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised, for what `quantize_rows` makes of x."""
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=dtype, device=x.device), scales
