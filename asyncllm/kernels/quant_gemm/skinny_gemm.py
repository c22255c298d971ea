"""Several rows times a quantised matrix, through tensor cores; `product.py` has the inner part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import num_sms
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.quant_gemm.matrix import Quantized, block_of, is_fast
from asyncllm.kernels.quant_gemm.product import ACTIVATIONS, Tiles, activate, multiply
from asyncllm.kernels.records import SILU, Activation


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr, bias_ptr, out_ptr, num_rows, out_features,
    limit, alpha,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    E8M0: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: out_features are half of the matrix's. SPLITS > 1: out is float32
    [splits, rows, features], of parts of the columns."""
    start = tl.program_id(0).to(tl.int64) * TILE
    feature = start + tl.arange(0, TILE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    inside = feature < out_features
    is_row = row < num_rows
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
    rows_ptr = x_ptr + row[:, None].to(tl.int64) * WIDTH
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    per_split: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    first = split * per_split
    acc, up = multiply(
        weight_ptr, scale_ptr, offset_ptr, table_ptr, rows_ptr, is_row, start,
        tl.arange(0, TILE), inside, out_features, first, tl.minimum(first + per_split, blocks),
        WIDTH, GROUP, BLOCK, FORMAT, OFFSET, E8M0, FAST, GATED, STAGES,
    )  # fmt: skip
    if GROUP == 0:
        acc *= tl.load(scale_ptr + feature, inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_scale = tl.load(scale_ptr + out_features + feature, inside, other=0.0)
            up *= up_scale.to(tl.float32)[None, :]
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_bias = tl.load(bias_ptr + out_features + feature, inside, other=0.0)
            up += up_bias.to(tl.float32)[None, :]
    if GATED:
        acc = activate(acc, up, limit, alpha, ACTIVATION)
    target = (split.to(tl.int64) * num_rows + row[:, None]) * out_features + feature[None, :]
    in_out = is_row[:, None] & inside[None, :]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), in_out)


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


def choose_tiles(num_rows: int, matrix: Quantized, gated: bool, sms: int) -> Tiles:
    """By sweeps on an H100 (docs/log/quantization.md), and enough programs to fill the GPU."""
    rows, tile = min(64, max(16, triton.next_power_of_2(num_rows))), 64
    features = len(matrix.weight) // (2 if gated else 1)
    programs = triton.cdiv(features, tile) * triton.cdiv(num_rows, rows)
    splits = 1 if gated else max(1, min(8, 2 * sms // programs, matrix.columns // 512))
    num_stages = 3 if rows == 64 else 4 if matrix.is_packed else 6
    return Tiles(rows, tile, block_of(matrix, 128), 4, num_stages, splits)


def skinny_gemm(
    x: torch.Tensor,
    matrix: Quantized,
    gated: bool = False,
    activation: Activation = SILU,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """x [T, columns] in 16 bits, contiguous, times the matrix, and its bias: [T, features]. gated:
    the activation of the first half times the second."""
    num_rows, features = x.shape[0], len(matrix.weight) // (2 if gated else 1)
    sms = num_sms(x.device) if x.is_cuda else 1
    tiles = tiles or choose_tiles(num_rows, matrix, gated, sms)
    out = x.new_empty((num_rows, features))
    parts = out
    if tiles.splits > 1:
        assert not gated
        parts = x.new_empty((tiles.splits, num_rows, features), dtype=torch.float32)
    flags = launch_flags(x.device)
    grid = triton.cdiv(features, tiles.features), triton.cdiv(num_rows, tiles.rows), tiles.splits
    _rows_kernel[grid](
        x, matrix.weight, matrix.scale, matrix.offset, matrix.table, matrix.bias, parts,
        num_rows, features, activation.limit, activation.alpha,
        WIDTH=matrix.columns, GROUP=matrix.group or 0, FORMAT=matrix.format,
        OFFSET=matrix.offset is not None, E8M0=matrix.is_e8m0, FAST=is_fast(x, matrix), GATED=gated,
        ACTIVATION=ACTIVATIONS[activation.name], HAS_BIAS=matrix.bias is not None,
        SPLITS=tiles.splits, ROWS=tiles.rows, TILE=tiles.features, BLOCK=tiles.block,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **flags,
    )  # fmt: skip
    if tiles.splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, matrix.bias, out, out.numel(), features,
            SPLITS=tiles.splits, BLOCK=1024, HAS_BIAS=matrix.bias is not None, **flags,
        )  # fmt: skip
    return out
