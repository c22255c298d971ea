"""Products with quantised matrices in Triton: one row, a few rows, and the matrix itself.

One form for all (models/quantization/scheme.py): bytes [features, columns], or two columns to a
byte; a scale for each row, or for each group of columns, whose sums are multiplied by it. So codes
are multiplied as they are, exactly, and what is read of memory is little more than they.

Codes of four bits are in chunks: byte i of a chunk has its column i in the low bits, in the high
ones that of the chunk's second half, so that neighbouring bytes meet neighbouring inputs:

    columns of a chunk of 8:   0 1 2 3 4 5 6 7      bytes:   4|0  5|1  6|2  7|3

One row ends as gemv's does: with the SwiGLU, or with the addition to the residual and the next
norm but for its factor. More rows go through tensor cores, in a product of their own; many are
faster by cuBLAS, after `dequantize` into 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import num_sms
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import Norm, Normed

TILE_BYTES = 2048  # of one row's program, at a time
MAX_CHUNK = 128  # columns that a tile takes together: of one scale, a power of two
LEAST_CHUNK = 32  # that tensor cores take, and
LEAST_ROWS = 16  # rows


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [features, columns] as kernels take it.

    weight: e4m3 or int8 [features, columns], or uint8 [features, columns / 2]. scale, offset:
    [features, groups]. table: float32 [16], the values of the codes of four bits; None: they are
    integers, and 8 is zero. group: columns that share a scale; None: all. chunk: see above; it
    divides the group, and, of four bits, the columns.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    table: torch.Tensor | None
    bias: torch.Tensor | None
    group: int | None
    chunk: int

    @property
    def is_packed(self) -> bool:
        return self.weight.dtype == torch.uint8

    @property
    def span(self) -> int:
        """Bytes of a chunk."""
        return self.chunk // 2 if self.is_packed else self.chunk

    @property
    def columns(self) -> int:
        return self.weight.shape[1] * (2 if self.is_packed else 1)


@triton.jit
def _low(byte, table_ptr, TABLE: tl.constexpr):
    if TABLE:
        return tl.load(table_ptr + (byte & 15).to(tl.int32))
    return (byte & 15).to(tl.float32) - 8.0


@triton.jit
def _high(byte, table_ptr, TABLE: tl.constexpr):
    if TABLE:
        return tl.load(table_ptr + (byte >> 4).to(tl.int32))
    return (byte >> 4).to(tl.float32) - 8.0


@triton.jit
def _multiply(
    byte, x_ptr, chunk, at, inside, table_ptr, SPAN: tl.constexpr, PACKED: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Bytes times the inputs of their columns, and the sum of these: byte `at` of each chunk."""
    if PACKED:
        column = chunk * (2 * SPAN) + at
        low = tl.load(x_ptr + column, inside, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + column + SPAN, inside, other=0.0).to(tl.float32)
        made = _low(byte, table_ptr, TABLE) * low + _high(byte, table_ptr, TABLE) * high
        return made, low + high
    x = tl.load(x_ptr + chunk * SPAN + at, inside, other=0.0).to(tl.float32)
    return byte.to(tl.float32) * x, x


@triton.jit
def _row_kernel(
    x_ptr, squares_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr, bias_ptr, next_norm_ptr,
    out_ptr, scaled_ptr, next_squares_ptr, out_features, num_squares, eps,
    BYTES: tl.constexpr, COLUMNS: tl.constexpr, NUM_GROUPS: tl.constexpr, FEATURES: tl.constexpr,
    CHUNKS: tl.constexpr, SPAN: tl.constexpr, PER_GROUP: tl.constexpr, PACKED: tl.constexpr,
    TABLE: tl.constexpr, BY_GROUP: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile is [FEATURES, CHUNKS, SPAN] bytes, PER_GROUP chunks to a scale. The rest is as in
    gemv."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < out_features
    row = feature.to(tl.int64)[:, None, None]
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    in_chunk = tl.arange(0, SPAN)[None, None, :]
    at = chunk * SPAN + in_chunk
    row_mask = inside[:, None, None]
    up_rows = out_features.to(tl.int64)
    source = weight_ptr + row * BYTES + at
    mask = row_mask & (at < BYTES)
    byte = tl.load(source, mask, other=0.0)
    up_byte = byte
    if GATED:
        up_byte = tl.load(source + up_rows * BYTES, mask, other=0.0)
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
        if SQUARES > 0:
            squares_ptr += after
        if ADD:
            scaled_ptr += after
            next_squares_ptr += after
    total = tl.zeros((FEATURES, CHUNKS, SPAN), tl.float32)
    up_total = tl.zeros((FEATURES, CHUNKS, SPAN), tl.float32)
    for start in tl.static_range(0, BYTES, CHUNKS * SPAN):
        number = start // SPAN + chunk
        has_x = start + at < BYTES
        made, x = _multiply(byte, x_ptr, number, in_chunk, has_x, table_ptr, SPAN, PACKED, TABLE)
        up_made = made
        if GATED:
            up_made, x = _multiply(
                up_byte, x_ptr, number, in_chunk, has_x, table_ptr, SPAN, PACKED, TABLE
            )
        if BY_GROUP:
            which = number // PER_GROUP
            scales = scale_ptr + row * NUM_GROUPS + which
            has_scale = row_mask & (which < NUM_GROUPS)
            made *= tl.load(scales, has_scale, other=0.0).to(tl.float32)
            if GATED:
                up_scale = tl.load(scales + up_rows * NUM_GROUPS, has_scale, other=0.0)
                up_made *= up_scale.to(tl.float32)
            if OFFSET:
                offsets = offset_ptr + row * NUM_GROUPS + which
                made += tl.load(offsets, has_scale, other=0.0).to(tl.float32) * x
                if GATED:
                    up_offset = tl.load(offsets + up_rows * NUM_GROUPS, has_scale, other=0.0)
                    up_made += up_offset.to(tl.float32) * x
        total += made
        if GATED:
            up_total += up_made
        if start + CHUNKS * SPAN < BYTES:  # the next bytes are asked for before these are added
            mask = row_mask & (start + CHUNKS * SPAN + at < BYTES)
            byte = tl.load(source + start + CHUNKS * SPAN, mask, other=0.0)
            if GATED:
                up_byte = tl.load(source + up_rows * BYTES + start + CHUNKS * SPAN, mask, other=0.0)

    result = tl.sum(tl.sum(total, axis=2), axis=1)
    up_result = tl.sum(tl.sum(up_total, axis=2), axis=1)
    if not BY_GROUP:
        result *= tl.load(scale_ptr + feature, inside, other=0.0).to(tl.float32)
        if GATED:
            up_result *= tl.load(scale_ptr + out_features + feature, inside, other=0.0)
    if SQUARES > 0:
        part = tl.arange(0, SQUARES)
        squares = tl.load(squares_ptr + part, part < num_squares, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
        result *= factor
        up_result *= factor
    if HAS_BIAS:
        result += tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + out_features + feature, inside, other=0.0)
            up_result += up_bias.to(tl.float32)
    if GATED:
        result = result / (1 + tl.exp(-result)) * up_result
    if ADD:
        result += tl.load(out_ptr + feature, inside, other=0.0).to(tl.float32)
    rounded = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + feature, rounded, inside)
    if ADD:
        sums = rounded.to(tl.float32)
        norm = tl.load(next_norm_ptr + feature, inside, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + feature, (sums * norm).to(out_ptr.dtype.element_ty), inside)
        tl.store(next_squares_ptr + tl.program_id(0), tl.sum(sums * sums, axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr, bias_ptr, out_ptr, num_rows, out_features,
    COLUMNS: tl.constexpr, NUM_GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, PACKED: tl.constexpr,
    TABLE: tl.constexpr, BY_GROUP: tl.constexpr, OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """STEP columns at a time, PER_GROUP steps to a scale. SPLITS > 1: out is float32
    [splits, rows, features], of parts of the columns."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    has_feature = (feature < out_features)[:, None]
    has_row = (row < num_rows)[None, :]
    per_byte: tl.constexpr = 2 if PACKED else 1
    span: tl.constexpr = STEP // per_byte
    bytes_: tl.constexpr = COLUMNS // per_byte
    at = tl.arange(0, span)
    weights = weight_ptr + feature.to(tl.int64)[:, None] * bytes_ + at[None, :]
    inputs = x_ptr + row.to(tl.int64)[None, :] * COLUMNS + at[:, None]
    if PDL:
        start_next()
        after = wait_previous()
        inputs += after
        out_ptr += after
    acc = tl.zeros((FEATURES, ROWS), tl.float32)
    steps: tl.constexpr = (COLUMNS + STEP - 1) // STEP
    per_split: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    dtype = x_ptr.dtype.element_ty
    for number in range(per_split):
        step = split * per_split + number
        left = bytes_ - step * span  # none where the last split has fewer steps
        has_scale = has_feature & (step < steps)
        byte = tl.load(weights + step * span, has_feature & (at < left)[None, :], other=0.0)
        wanted = has_row & (at < left)[:, None]
        x = tl.load(inputs + step * STEP, wanted, other=0.0)  # [span, ROWS]
        if PACKED:
            high = tl.load(inputs + step * STEP + span, wanted, other=0.0)
            made = tl.dot(_low(byte, table_ptr, TABLE).to(dtype), x)
            made = tl.dot(_high(byte, table_ptr, TABLE).to(dtype), high, made)
        else:
            made = tl.dot(byte.to(tl.float32).to(dtype), x)
        if BY_GROUP:
            which = feature[:, None] * NUM_GROUPS + step // PER_GROUP
            made *= tl.load(scale_ptr + which, has_scale, other=0.0).to(tl.float32)
            if OFFSET:
                sums = tl.sum(x.to(tl.float32), axis=0)
                if PACKED:
                    sums += tl.sum(high.to(tl.float32), axis=0)
                offset = tl.load(offset_ptr + which, has_scale, other=0.0).to(tl.float32)
                made += offset * sums[None, :]
        acc += made
    if not BY_GROUP:
        acc *= tl.load(scale_ptr + feature[:, None], has_feature, other=0.0).to(tl.float32)
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + feature[:, None], has_feature, other=0.0).to(tl.float32)
    target = (split.to(tl.int64) * num_rows + row[None, :]) * out_features + feature[:, None]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), has_feature & has_row)


@triton.jit
def _sum_kernel(
    parts_ptr, bias_ptr, out_ptr, num_numbers, out_features,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        start_next()
        after = wait_previous()
        parts_ptr += after
        out_ptr += after
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_numbers
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * num_numbers + at, inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % out_features, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _matrix_kernel(
    weight_ptr, scale_ptr, offset_ptr, table_ptr, out_ptr, out_features,
    BYTES: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, TABLE: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)[:, None]
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (feature < out_features) & (at < BYTES)
    byte = tl.load(weight_ptr + feature.to(tl.int64) * BYTES + at, mask, other=0.0)
    column = at
    if PACKED:
        column = at // SPAN * (2 * SPAN) + at % SPAN
    which = feature * NUM_GROUPS + column // GROUP
    scale = tl.load(scale_ptr + which, mask, other=0.0).to(tl.float32)
    offset = tl.zeros((FEATURES, BLOCK), tl.float32)
    if OFFSET:
        offset = tl.load(offset_ptr + which, mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if PACKED:
        target = out_ptr + feature.to(tl.int64) * (2 * BYTES) + column
        tl.store(target, (_low(byte, table_ptr, TABLE) * scale + offset).to(dtype), mask)
        tl.store(target + SPAN, (_high(byte, table_ptr, TABLE) * scale + offset).to(dtype), mask)
    else:
        made = byte.to(tl.float32) * scale + offset
        tl.store(out_ptr + feature.to(tl.int64) * BYTES + at, made.to(dtype), mask)


def one_row(x: Normed, matrix: Quantized, gated: bool = False) -> torch.Tensor:
    """x [1, columns] times the matrix, and its bias: [1, features]. gated: silu of the first half
    times the second."""
    features = matrix.weight.shape[0] // 2 if gated else matrix.weight.shape[0]
    out = x.values.new_empty((1, features))
    _launch_row(x, matrix, None, out, None, None, gated)
    return out


def one_row_add_norm(
    x: torch.Tensor, matrix: Quantized, residual: torch.Tensor, norm: Norm
) -> Normed:
    """In place: residual [1, features] += the product. Returns the norm of the sum."""
    programs = triton.cdiv(len(matrix.weight), _features(matrix, gated=False))
    squares = residual.new_empty((1, programs), dtype=torch.float32)
    scaled = torch.empty_like(residual)
    _launch_row(Normed(x), matrix, norm, residual, scaled, squares, gated=False)
    return Normed(scaled, squares, norm.eps)


def _features(matrix: Quantized, gated: bool) -> int:
    """Outputs of a program."""
    return 2 if gated or matrix.weight.shape[1] > 4096 else 4


def _launch_row(
    x: Normed,
    matrix: Quantized,
    norm: Norm | None,
    out: torch.Tensor,
    scaled: torch.Tensor | None,
    squares: torch.Tensor | None,
    gated: bool,
) -> None:
    num_bytes, features = matrix.weight.shape[1], _features(matrix, gated)
    row_bytes = triton.next_power_of_2(num_bytes)
    chunks = max(1, min(TILE_BYTES // features, row_bytes) // matrix.span)
    num_squares = x.squares.shape[1] if x.squares is not None else 0
    _row_kernel[(triton.cdiv(out.shape[1], features),)](
        x.values, x.squares, matrix.weight, matrix.scale, matrix.offset, matrix.table, matrix.bias,
        norm.weight if norm is not None else None, out, scaled, squares,
        out.shape[1], num_squares, x.eps,
        BYTES=num_bytes, COLUMNS=matrix.columns, NUM_GROUPS=matrix.scale.shape[1],
        FEATURES=features, CHUNKS=chunks, SPAN=matrix.span,
        PER_GROUP=(matrix.group or matrix.chunk) // matrix.chunk, PACKED=matrix.is_packed,
        TABLE=matrix.table is not None, BY_GROUP=matrix.group is not None,
        OFFSET=matrix.offset is not None, GATED=gated, HAS_BIAS=matrix.bias is not None,
        ADD=norm is not None, SQUARES=triton.next_power_of_2(num_squares) if num_squares else 0,
        num_warps=4, **launch_flags(out.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of a product of several rows: features and rows of a program, parts of the columns."""

    features: int
    rows: int
    splits: int
    num_warps: int
    num_stages: int


def choose_tiles(num_rows: int, features: int, columns: int, sms: int) -> Tiles:
    """Enough programs to fill the GPU, by tiles of few features or by splits."""
    rows = min(64, max(LEAST_ROWS, triton.next_power_of_2(num_rows)))
    tile = 64 if rows <= 32 else 128
    programs = triton.cdiv(features, tile) * triton.cdiv(num_rows, rows)
    splits = max(1, min(8, 2 * sms // programs, columns // 512))
    return Tiles(tile, rows, splits, 4, 4)


def several_rows(x: torch.Tensor, matrix: Quantized, tiles: Tiles | None = None) -> torch.Tensor:
    """x [T, columns] in 16 bits, contiguous, times the matrix, and its bias: [T, features]."""
    num_rows, features = x.shape[0], matrix.weight.shape[0]
    sms = num_sms(x.device) if x.is_cuda else 1
    tiles = tiles or choose_tiles(num_rows, features, matrix.columns, sms)
    out = x.new_empty((num_rows, features))
    parts = out
    if tiles.splits > 1:
        parts = x.new_empty((tiles.splits, num_rows, features), dtype=torch.float32)
    flags = launch_flags(x.device)
    grid = triton.cdiv(features, tiles.features), triton.cdiv(num_rows, tiles.rows), tiles.splits
    _rows_kernel[grid](
        x, matrix.weight, matrix.scale, matrix.offset, matrix.table, matrix.bias, parts,
        num_rows, features,
        COLUMNS=matrix.columns, NUM_GROUPS=matrix.scale.shape[1],
        PER_GROUP=(matrix.group or matrix.chunk) // matrix.chunk, STEP=matrix.chunk,
        SPLITS=tiles.splits, ROWS=tiles.rows,
        FEATURES=tiles.features, PACKED=matrix.is_packed, TABLE=matrix.table is not None,
        BY_GROUP=matrix.group is not None, OFFSET=matrix.offset is not None,
        HAS_BIAS=matrix.bias is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **flags,
    )  # fmt: skip
    if tiles.splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, matrix.bias, out, out.numel(), features,
            SPLITS=tiles.splits, BLOCK=1024, HAS_BIAS=matrix.bias is not None, **flags,
        )  # fmt: skip
    return out


def dequantize(matrix: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in 16 bits, [features, columns], a new tensor."""
    features, num_bytes = matrix.weight.shape
    out = torch.empty((features, matrix.columns), dtype=dtype, device=matrix.weight.device)
    _matrix_kernel[(triton.cdiv(features, 4), triton.cdiv(num_bytes, 512))](
        matrix.weight, matrix.scale, matrix.offset, matrix.table, out, features,
        BYTES=num_bytes, NUM_GROUPS=matrix.scale.shape[1], GROUP=matrix.group or matrix.columns,
        SPAN=matrix.span, FEATURES=4, BLOCK=512, PACKED=matrix.is_packed,
        TABLE=matrix.table is not None,
        OFFSET=matrix.offset is not None, num_warps=4,
    )  # fmt: skip
    return out


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
    most = tl.max(tl.abs(x), axis=0)
    scale = tl.where(most > 0, most / MOST, 1.0)
    made = x / scale
    if INTEGER:
        made = tl.where(made < 0, tl.ceil(made - 0.5), tl.floor(made + 0.5))
    tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + tl.program_id(0), scale)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, size] as e4m3 or int8 by each row's largest number, and the scales, float32 [T, 1]."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    is_integer = dtype == torch.int8
    _quantize_kernel[(len(x),)](
        x, out, scales, SIZE=x.shape[1], BLOCK=block, MOST=127.0 if is_integer else 448.0,
        INTEGER=is_integer, num_warps=max(1, min(block // 512, 16)), **launch_flags(x.device),
    )  # fmt: skip
    return out, scales
