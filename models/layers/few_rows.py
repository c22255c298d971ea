"""Matrix products of 1 to 16 rows in Triton, together with what comes before and after them.

At few rows a product is a read of its weights; what it costs besides is latency: of launching, of
waiting for the kernel before, of filling the memory's queues again. So the SwiGLU product, the
addition to the residual and the next RMSNorm happen here (of the norm all but a factor per row,
which the next product applies to its result: `Normed`). Launches are programmatic: a program asks
for weights before it waits for the kernel before it, and lets the kernel after it begin at once.

    rows 1      products in float32, no tensor cores: nearest to the memory's speed
    rows 2..16  tensor cores, the weights as the large operand, copied ahead in a pipeline
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncllm.attention.programmatic_launch import (
    has_programmatic_launch,
    prefetch,
    start_next,
    wait_previous,
)
from asyncllm.models.layers.ops import Norm, Normed

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """features: outputs per program; block: columns of the weights at a time; stages: such blocks
    in flight (rows 2..16); prefetched: columns asked for before the kernel before has ended."""

    features: int
    block: int
    num_warps: int
    stages: int = 1
    prefetched: int = 0


@triton.jit
def _finish(
    result, up, bias_ptr, out_ptr, scaled_ptr, next_norm_ptr, squares_ptr, next_squares_ptr,
    row, feature, num_rows, out_features, num_squares, size, eps,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """From the sums [FEATURES, ROWS] to what is stored."""
    inside = feature < out_features
    if SQUARES > 0:
        part = tl.arange(0, SQUARES)
        in_squares = (row < num_rows)[:, None] & (part < num_squares)[None, :]
        squares = tl.load(
            squares_ptr + row[:, None] * num_squares + part[None, :], in_squares, other=0.0
        )
        factor = tl.rsqrt(tl.sum(squares, axis=1) / size + eps)[None, :]
        result *= factor
        up *= factor
    if HAS_BIAS:
        result += tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            more = tl.load(bias_ptr + out_features + feature, inside, other=0.0)
            up += more.to(tl.float32)[:, None]
    if GATED:
        result = result / (1 + tl.exp(-result)) * up
    place = row[None, :] * out_features + feature[:, None]
    mask = inside[:, None] & (row < num_rows)[None, :]
    if ADD:
        result += tl.load(out_ptr + place, mask, other=0.0).to(tl.float32)
    rounded = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, rounded, mask)
    if ADD:
        total = rounded.to(tl.float32)
        norm = tl.load(next_norm_ptr + feature, inside, other=0.0).to(tl.float32)[:, None]
        tl.store(scaled_ptr + place, (total * norm).to(out_ptr.dtype.element_ty), mask)
        place = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(next_squares_ptr + place, tl.sum(total * total, axis=0), row < num_rows)


@triton.jit
def _one_row_kernel(
    x_ptr, squares_ptr, weight_ptr, bias_ptr, next_norm_ptr, out_ptr, scaled_ptr, next_squares_ptr,
    num_rows, out_features, num_squares, eps,
    K: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = (feature < out_features)[:, None]
    column = tl.arange(0, BLOCK)
    source = weight_ptr + feature.to(tl.int64)[:, None] * K + column[None, :]
    up_rows = out_features.to(tl.int64) * K
    weight = tl.load(source, inside & (column < K)[None, :], other=0.0)
    up = weight
    if GATED:
        up = tl.load(source + up_rows, inside & (column < K)[None, :], other=0.0)
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
    total = tl.zeros((FEATURES, BLOCK), tl.float32)
    up_total = tl.zeros((FEATURES, BLOCK), tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        x = tl.load(x_ptr + start + column, start + column < K, other=0.0).to(tl.float32)[None, :]
        total += weight.to(tl.float32) * x
        if GATED:
            up_total += up.to(tl.float32) * x
        if start + BLOCK < K:
            mask = inside & (start + BLOCK + column < K)[None, :]
            weight = tl.load(source + start + BLOCK, mask, other=0.0)
            if GATED:
                up = tl.load(source + up_rows + start + BLOCK, mask, other=0.0)
    _finish(
        tl.sum(total, axis=1)[:, None], tl.sum(up_total, axis=1)[:, None],
        bias_ptr, out_ptr, scaled_ptr, next_norm_ptr, squares_ptr, next_squares_ptr,
        tl.arange(0, 1), feature, num_rows, out_features, num_squares, K, eps,
        GATED, HAS_BIAS, ADD, SQUARES,
    )  # fmt: skip


@triton.jit
def _rows_kernel(
    x_ptr, squares_ptr, weight_ptr, bias_ptr, next_norm_ptr, out_ptr, scaled_ptr, next_squares_ptr,
    num_rows, out_features, num_squares, eps,
    K: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = (feature < out_features)[:, None]
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    rows_of_weight = weight_ptr + feature.to(tl.int64)[:, None] * K
    up_rows = out_features.to(tl.int64) * K
    if PDL:
        start_next()
        if PREFETCHED > 0:
            line = tl.arange(0, PREFETCHED // 64) * 64  # 128 bytes each
            mask = inside & (line < K)[None, :]
            prefetch(tl.where(mask, rows_of_weight + line[None, :], weight_ptr))
            if GATED:
                prefetch(tl.where(mask, rows_of_weight + up_rows + line[None, :], weight_ptr))
        after = wait_previous()
        x_ptr += after
        out_ptr += after
        if SQUARES > 0:
            squares_ptr += after
        if ADD:
            scaled_ptr += after
            next_squares_ptr += after
    in_rows = (row < num_rows)[None, :]
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    up_total = tl.zeros((FEATURES, ROWS), tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        k = start + column
        weight = tl.load(rows_of_weight + k[None, :], inside & (k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + row[None, :] * K + k[:, None], in_rows & (k < K)[:, None], other=0.0)
        total = tl.dot(weight, x, total)
        if GATED:
            source = rows_of_weight + up_rows + k[None, :]
            up = tl.load(source, inside & (k < K)[None, :], other=0.0)
            up_total = tl.dot(up, x, up_total)
    _finish(
        total, up_total, bias_ptr, out_ptr, scaled_ptr, next_norm_ptr, squares_ptr,
        next_squares_ptr, row, feature, num_rows, out_features, num_squares, K, eps,
        GATED, HAS_BIAS, ADD, SQUARES,
    )  # fmt: skip


def few_rows_linear(
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`Ops.linear`, or `Ops.gated_linear`, for at most MAX_ROWS rows."""
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.values.new_empty((x.values.shape[0], out_features))
    _launch(x, weight, bias, out, None, None, gated, tiles)
    return out


def few_rows_add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: Norm,
    tiles: Tiles | None = None,
) -> Normed:
    """`Ops.add_linear` for at most MAX_ROWS rows."""
    scaled = torch.empty_like(residual)
    squares = _launch(Normed(x), weight, bias, residual, norm, scaled, False, tiles)
    return Normed(scaled, squares, norm.eps)


def _launch(
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    norm: Norm | None,
    scaled: torch.Tensor | None,
    gated: bool,
    tiles: Tiles | None,
) -> torch.Tensor | None:
    num_rows, in_features = x.values.shape
    out_features = out.shape[1]
    tiles = tiles or choose_tiles(num_rows, in_features, out_features, gated)
    num_programs = triton.cdiv(out_features, tiles.features)
    squares = None
    if norm is not None:
        squares = out.new_empty((num_rows, num_programs), dtype=torch.float32)
    num_squares = x.squares.shape[1] if x.squares is not None else 0
    pdl = has_programmatic_launch(out.device)
    flags = {
        "K": in_features, "FEATURES": tiles.features, "BLOCK": tiles.block, "GATED": gated,
        "HAS_BIAS": bias is not None, "ADD": norm is not None,
        "SQUARES": triton.next_power_of_2(num_squares) if num_squares else 0, "PDL": pdl,
        "num_warps": tiles.num_warps,
    }  # fmt: skip
    if pdl:
        flags["launch_pdl"] = True
    if num_rows > 1:
        flags |= {"ROWS": 8 if num_rows <= 8 else 16, "STAGES": tiles.stages}
        flags["PREFETCHED"] = tiles.prefetched
    kernel = _rows_kernel if num_rows > 1 else _one_row_kernel
    kernel[(num_programs,)](
        x.values, x.squares, weight, bias, norm.weight if norm is not None else None, out, scaled,
        squares, num_rows, out_features, num_squares, x.eps, **flags,
    )  # fmt: skip
    return squares


def choose_tiles(num_rows: int, in_features: int, out_features: int, gated: bool) -> Tiles:
    if num_rows == 1:
        return Tiles(1, 1024, 4)
    return Tiles(32, 128, 4, 4, 256)
