"""Matrix times one row in Triton, together with what comes before and after it.

For one row a product is a read of its weights; what it costs besides is latency: of launching, of
waiting for the kernel before, of filling the memory's queues again. So the SwiGLU product, the
addition to the residual and the next RMSNorm happen here (of the norm all but a factor per row,
which the next product applies to its result: `Normed`). Launches are programmatic: a program asks
for weights before it waits for the kernel before it, and lets the kernel after it begin at once.
Sums are in float32. The same for 2 to 16 rows made whole steps slower (docs/log/decode.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import RowProduct, Start
from asyncllm.kernels.gemv.tiles import Tiles, choose_tiles, num_squares
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import Norm, Normed


@triton.jit
def finish_row(
    result, up_result, feature, inside, squares_ptr, bias_ptr, next_norm_ptr, out_ptr, scaled_ptr,
    next_squares_ptr, out_features, num_squares, eps,
    K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    """End a product of one row for some features: float32 sums to `out`, and so on."""
    if SQUARES > 0:
        part = tl.arange(0, SQUARES)
        squares = tl.load(squares_ptr + part, part < num_squares, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
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


@triton.jit
def _gemv_kernel(
    x_ptr, squares_ptr, weight_ptr, bias_ptr, next_norm_ptr, out_ptr, scaled_ptr, next_squares_ptr,
    out_features, num_squares, eps,
    K: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SQUARES: `num_squares` padded, 0 for a factor that is applied already. ADD: out is the
    residual; `scaled` and a part of `next_squares` are the next norm's."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < out_features
    column = tl.arange(0, BLOCK)
    source = weight_ptr + feature.to(tl.int64)[:, None] * K + column[None, :]
    mask = inside[:, None] & (column < K)[None, :]
    weight = tl.load(source, mask, other=0.0)
    up = weight
    if GATED:  # a lone feature, never gated, is a constant without `.to`
        up_rows = out_features.to(tl.int64) * K
        up = tl.load(source + up_rows, mask, other=0.0)
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
        if start + BLOCK < K:  # the next weights are asked for before these are used
            mask = inside[:, None] & (start + BLOCK + column < K)[None, :]
            weight = tl.load(source + start + BLOCK, mask, other=0.0)
            if GATED:
                up = tl.load(source + up_rows + start + BLOCK, mask, other=0.0)

    result = tl.sum(total, axis=1)
    up_result = tl.sum(up_total, axis=1)
    finish_row(
        result, up_result, feature, inside, squares_ptr, bias_ptr, next_norm_ptr, out_ptr,
        scaled_ptr, next_squares_ptr, out_features, num_squares, eps,
        K, GATED, HAS_BIAS, ADD, SQUARES,
    )  # fmt: skip


def gemv(
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool = False,
) -> torch.Tensor:
    """`Ops.product`, or `Ops.product_swiglu`, of one row."""
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.values.new_empty((1, out_features))
    tiles = choose_tiles(weight.shape[1], gated, adds=False)
    _launch(tiles, x, weight, bias, None, out, None, None, gated)
    return out


def gemv_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: Norm,
) -> Normed:
    """`Ops.product_add_rms_norm` of one row."""
    tiles = choose_tiles(weight.shape[1], gated=False, adds=True)
    squares = residual.new_empty((1, num_squares(weight)), dtype=torch.float32)
    scaled = torch.empty_like(residual)
    _launch(tiles, Normed(x), weight, bias, norm, residual, scaled, squares, gated=False)
    return Normed(scaled, squares, norm.eps)


def _launch(
    tiles: Tiles,
    x: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    out: torch.Tensor,
    scaled: torch.Tensor | None,
    squares: torch.Tensor | None,
    gated: bool,
) -> None:
    assert x.values.is_contiguous() and weight.is_contiguous()
    out_features = out.shape[1]
    num_squares = x.squares.shape[1] if x.squares is not None else 0
    _gemv_kernel[(triton.cdiv(out_features, tiles.features),)](
        x.values, x.squares, weight, bias, norm.weight if norm is not None else None, out, scaled,
        squares, out_features, num_squares, x.eps,
        K=weight.shape[1], FEATURES=tiles.features, BLOCK=tiles.block, GATED=gated,
        HAS_BIAS=bias is not None, ADD=norm is not None,
        SQUARES=triton.next_power_of_2(num_squares) if num_squares else 0,
        num_warps=tiles.num_warps, **launch_flags(out.device),
    )  # fmt: skip


def prewarm(start: Start) -> Iterator[Callable[[], object]]:
    """Each a second of compiling, one after the other were the first step of one row."""
    yield from (partial(_multiply_zeros, start, product) for product in start.row_products)


def _multiply_zeros(start: Start, product: RowProduct) -> None:
    def zeros(*shape: int, dtype: torch.dtype = start.dtype) -> torch.Tensor:
        return start.zeros(*shape, dtype=dtype)

    features = product.out_features
    rows = 2 * features if product.gated else features
    weight = zeros(rows, product.in_features)
    bias = zeros(rows) if product.has_bias else None
    squares = zeros(1, product.squares, dtype=torch.float32) if product.squares else None
    x = Normed(zeros(1, product.in_features), squares, 1.0)
    if product.norm_dtype is None:
        gemv(x, weight, bias, product.gated)
    else:
        norm = Norm(zeros(features, dtype=product.norm_dtype), 1.0)
        gemv_add_norm(x.values, weight, bias, zeros(1, features), norm)
