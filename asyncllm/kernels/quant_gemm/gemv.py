"""One row times a quantised matrix, with what comes before and after it, as kernels/gemv has it.

Codes of four bits become numbers by their bits: those of int4 are the mantissa of 16 + code, and
24 times the sum of the inputs is taken off again. Experts of few tokens are summed by the same loop
(kernels/experts/rows.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.gemv.kernel import finish_row
from asyncllm.kernels.gemv.tiles import Tiles
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.quant_gemm.matrix import Quantized, is_fast
from asyncllm.kernels.quant_gemm.product import fast_codes
from asyncllm.kernels.records import Norm, Normed

# Blocks of a row that are compiled side by side: the 28 of 14,336 columns took 32 to 50 s.
MOST_UNROLLED = tl.constexpr(8)


@triton.jit
def _value(words, plane: tl.constexpr, table_ptr, FORMAT: tl.constexpr):
    """float32; of int4 24 more than it is."""
    if FORMAT == 2:
        bits = words << (19 - 4 * plane) if plane < 5 else words >> (4 * plane - 19)
        value = ((bits & 0x00780000) | 0x41800000).to(tl.float32, bitcast=True)
    else:
        value = tl.load(table_ptr + ((words >> (4 * plane)) & 15))
    return value


@triton.jit
def _multiply_words(
    words, x_ptr, scale_ptr, offset_ptr, table_ptr, row, chunk, has_chunk, in_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    E8M0: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """[FEATURES, CHUNKS, 16] words times their inputs, by their scales where there are groups."""
    chunks: tl.constexpr = (WIDTH + 127) // 128
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP if GROUP > 0 else 1
    is_small: tl.constexpr = GROUP > 0 and GROUP < 128
    planes: tl.constexpr = GROUP // 16 if is_small else 8
    lane = tl.arange(0, 16)[None, None, :]
    total = tl.zeros(words.shape, tl.float32)
    codes = fast_codes(words, FORMAT) if FAST and FORMAT == 3 else words
    exponents = tl.zeros_like(row * chunk)
    if E8M0:
        exponents = tl.load(scale_ptr + row * chunks + chunk, in_rows & has_chunk, other=0)
    for start in tl.static_range(0, 8, planes):
        sums = tl.zeros(lane.shape, tl.float32)
        part = tl.zeros(words.shape, tl.float32)
        for plane in tl.static_range(start, start + planes):
            column = chunk * 128 + plane * 16 + lane
            x = tl.load(x_ptr + column, column < WIDTH, other=0.0).to(tl.float32)
            if FAST and FORMAT == 3:
                part += codes[plane].to(tl.float32) * x
            else:
                part += _value(words, plane, table_ptr, FORMAT) * x
            sums += x
        if FORMAT == 2:
            part -= 24.0 * sums
        if GROUP > 0:
            group = (chunk * 128 + start * 16) // GROUP
            at = row * groups + group
            has_group = in_rows & (group < groups)
            if E8M0:
                bits = ((exponents >> (start // planes * 8)) & 255).to(tl.int32) << 23
                scale = bits.to(tl.float32, bitcast=True)
            else:
                scale = tl.load(scale_ptr + at, has_group, other=0.0).to(tl.float32)
            part *= scale
            if OFFSET:
                part += tl.load(offset_ptr + at, has_group, other=0.0).to(tl.float32) * sums
        total += part
    return total


@triton.jit
def _multiply_bytes(
    byte, x_ptr, scale_ptr, offset_ptr, row, column, in_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """[FEATURES, BLOCK, 1] bytes, likewise."""
    x = tl.load(x_ptr + column, column < WIDTH, other=0.0).to(tl.float32)
    made = byte.to(tl.float32) * x
    if GROUP > 0:
        groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        at = row * groups + column // GROUP
        has_group = in_rows & (column < WIDTH)
        made *= tl.load(scale_ptr + at, has_group, other=0.0).to(tl.float32)
        if OFFSET:
            made += tl.load(offset_ptr + at, has_group, other=0.0).to(tl.float32) * x
    return made


@triton.jit
def places_of_rows(
    weight_ptr, row, in_rows, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the weights of rows [FEATURES, 1, 1] begin, and the first BLOCK of them, a tile
    [FEATURES, BLOCK / LANES, LANES] of words of four bits or bytes; LANES are 16 words of a chunk,
    or one byte."""
    LANES: tl.constexpr = 16 if FORMAT >= 2 else 1
    STORED: tl.constexpr = (WIDTH + 127) // 128 * 16 if FORMAT >= 2 else WIDTH
    TILE_ROWS: tl.constexpr = 8 if FORMAT >= 2 else 1
    part = tl.arange(0, BLOCK // LANES)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    tiles = part * (LANES * TILE_ROWS) + lane
    place = row // TILE_ROWS * (STORED * TILE_ROWS) + row % TILE_ROWS * LANES + tiles
    weight = tl.load(weight_ptr + place, in_rows & (part * LANES + lane < STORED), other=0.0)
    return place, weight


@triton.jit
def sums_of_rows(
    weight, up_weight, place, up_place, row, up_row, in_rows,
    x_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    E8M0: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """x times each row, and, GATED, times each `up_row`: [FEATURES]. weight, place: as
    `places_of_rows` returns them."""
    LANES: tl.constexpr = 16 if FORMAT >= 2 else 1
    STORED: tl.constexpr = (WIDTH + 127) // 128 * 16 if FORMAT >= 2 else WIDTH
    TILE_ROWS: tl.constexpr = 8 if FORMAT >= 2 else 1
    part = tl.arange(0, BLOCK // LANES)[None, :, None]
    at = part * LANES + tl.arange(0, LANES)[None, None, :]
    total = tl.zeros(weight.shape, tl.float32)
    up_total = tl.zeros(weight.shape, tl.float32)
    BLOCKS: tl.constexpr = (STORED + BLOCK - 1) // BLOCK
    LOOPS: tl.constexpr = (BLOCKS + MOST_UNROLLED - 1) // MOST_UNROLLED
    UNROLLED: tl.constexpr = (BLOCKS + LOOPS - 1) // LOOPS
    for first in tl.range(0, BLOCKS, UNROLLED):
        for i in tl.static_range(UNROLLED):
            start = (first + i) * BLOCK
            number = start // LANES + part
            if FORMAT >= 2:
                has_chunk = number * 16 < STORED
                total += _multiply_words(
                    weight, x_ptr, scale_ptr, offset_ptr, table_ptr, row, number, has_chunk,
                    in_rows, WIDTH, GROUP, FORMAT, OFFSET, E8M0, FAST,
                )  # fmt: skip
                if GATED:
                    up_total += _multiply_words(
                        up_weight, x_ptr, scale_ptr, offset_ptr, table_ptr, up_row, number,
                        has_chunk, in_rows, WIDTH, GROUP, FORMAT, OFFSET, E8M0, FAST,
                    )  # fmt: skip
            else:
                total += _multiply_bytes(
                    weight, x_ptr, scale_ptr, offset_ptr, row, number, in_rows,
                    WIDTH, GROUP, OFFSET,
                )  # fmt: skip
                if GATED:
                    up_total += _multiply_bytes(
                        up_weight, x_ptr, scale_ptr, offset_ptr, up_row, number, in_rows,
                        WIDTH, GROUP, OFFSET,
                    )  # fmt: skip
            # The next are asked for before these are added.
            mask = in_rows & (start + BLOCK + at < STORED)
            ahead = (start + BLOCK) * TILE_ROWS
            weight = tl.load(weight_ptr + place + ahead, mask, other=0.0)
            if GATED:
                up_weight = tl.load(weight_ptr + up_place + ahead, mask, other=0.0)
    return tl.sum(tl.sum(total, axis=2), axis=1), tl.sum(tl.sum(up_total, axis=2), axis=1)


@triton.jit
def _row_kernel(
    x_ptr, squares_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr, bias_ptr, next_norm_ptr,
    out_ptr, scaled_ptr, next_squares_ptr, out_features, num_squares, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    E8M0: tl.constexpr, FAST: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As in kernels/gemv, but for how the weights are stored."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < out_features
    row = feature.to(tl.int64)[:, None, None]
    in_rows = inside[:, None, None]
    up_row = row + out_features
    place, weight = places_of_rows(weight_ptr, row, in_rows, WIDTH, FORMAT, BLOCK)
    up_place, up_weight = place, weight
    if GATED:
        up_place, up_weight = places_of_rows(weight_ptr, up_row, in_rows, WIDTH, FORMAT, BLOCK)
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
    result, up_result = sums_of_rows(
        weight, up_weight, place, up_place, row, up_row, in_rows,
        x_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr,
        WIDTH, GROUP, FORMAT, OFFSET, E8M0, FAST, BLOCK, GATED,
    )  # fmt: skip
    if GROUP == 0:
        result *= tl.load(scale_ptr + feature, inside, other=0.0).to(tl.float32)
        if GATED:
            up_scale = tl.load(scale_ptr + out_features + feature, inside, other=0.0)
            up_result *= up_scale.to(tl.float32)
    finish_row(
        result, up_result, feature, inside, squares_ptr, bias_ptr, next_norm_ptr, out_ptr,
        scaled_ptr, next_squares_ptr, out_features, num_squares, eps,
        WIDTH, GATED, HAS_BIAS, ADD, SQUARES,
    )  # fmt: skip


def gemv(x: Normed, matrix: Quantized, gated: bool = False) -> torch.Tensor:
    """x [1, columns] times the matrix, and its bias: [1, features]. gated: silu of the first half
    times the second."""
    out = x.values.new_empty((1, len(matrix.weight) // (2 if gated else 1)))
    _launch(choose_row_tiles(matrix, gated), x, matrix, None, out, None, None, gated)
    return out


def gemv_add_norm(x: torch.Tensor, matrix: Quantized, residual: torch.Tensor, norm: Norm) -> Normed:
    """In place: residual [1, features] += the product. Returns the norm of the sum."""
    tiles = choose_row_tiles(matrix, gated=False)
    programs = triton.cdiv(len(matrix.weight), tiles.features)
    squares = residual.new_empty((1, programs), dtype=torch.float32)
    scaled = torch.empty_like(residual)
    _launch(tiles, Normed(x), matrix, norm, residual, scaled, squares, gated=False)
    return Normed(scaled, squares, norm.eps)


def choose_row_tiles(matrix: Quantized, gated: bool) -> Tiles:
    """By sweeps on an H100, weights from memory (docs/log/quantization.md). A block is of bytes, or
    of words."""
    if matrix.is_packed:
        return Tiles(4, 64, 4)
    return Tiles(2, 2048, 4) if gated or matrix.columns > 4096 else Tiles(4, 1024, 4)


def _launch(
    tiles: Tiles,
    x: Normed,
    matrix: Quantized,
    norm: Norm | None,
    out: torch.Tensor,
    scaled: torch.Tensor | None,
    squares: torch.Tensor | None,
    gated: bool,
) -> None:
    num_squares = x.squares.shape[1] if x.squares is not None else 0
    _row_kernel[(triton.cdiv(out.shape[1], tiles.features),)](
        x.values, x.squares, matrix.weight, matrix.scale, matrix.offset, matrix.table, matrix.bias,
        norm.weight if norm is not None else None, out, scaled, squares,
        out.shape[1], num_squares, x.eps,
        WIDTH=matrix.columns, GROUP=matrix.group or 0, FORMAT=matrix.format,
        OFFSET=matrix.offset is not None, E8M0=matrix.is_e8m0, FAST=is_fast(x.values, matrix),
        FEATURES=tiles.features, BLOCK=tiles.block, GATED=gated,
        HAS_BIAS=matrix.bias is not None, ADD=norm is not None,
        SQUARES=triton.next_power_of_2(num_squares) if num_squares else 0,
        num_warps=tiles.num_warps, **launch_flags(out.device),
    )  # fmt: skip
