"""LoRA's second product in Triton: what was shrunk, times the adapter's `b`, added to the product.

    product[t, part p] += gain * product + b[slot of t, part p] @ sum of partials + bias

SwiGLU behind it can be the same kernel, which has the numbers at hand. All that a program reads it
asks for at once, behind its wait: the product is the kernel before it, and may be one that lets
nothing begin early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.programmatic_launch import (
    launch_flags,
    prefetch,
    start_next,
    wait_previous,
)
from asyncllm.kernels.records import AdapterRows, LoRAWeights

EXPAND_COLUMNS = 128  # of the product, to a program
GATED_COLUMNS = 128  # of each of its halves
EXPAND_WARPS = 8  # with four Triton needs two to three times as many barriers
LINE = tl.constexpr(64)  # numbers of 16 bits in 128 bytes


@triton.jit
def _prefetch_b(b_ptr, first, end, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for a slot's b of some columns."""
    line = first * RANK + tl.arange(0, COLUMNS * RANK // LINE) * LINE
    prefetch(b_ptr + tl.minimum(line, end * RANK - 1))


@triton.jit
def _load_partial(
    partial_ptr, place, part, is_own, piece_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Read what shrink made of the rows at these places, not summed yet: [PIECES, TILE, RANK]."""
    piece = tl.arange(0, triton.next_power_of_2(PIECES))[:, None, None]
    offset = ((place.to(tl.int64) * PARTS + part) * RANK)[None, :, None]
    partial_ptr += piece * piece_stride + offset + tl.arange(0, RANK)[None, None, :]
    return tl.load(partial_ptr, (piece < PIECES) & is_own[None, :, None], other=0.0)


@triton.jit
def _load_b(b_ptr, column, inside, RANK: tl.constexpr):
    """Read a slot's b of some columns: [RANK, columns]."""
    places = column[None, :] * RANK + tl.arange(0, RANK)[:, None]
    return tl.load(b_ptr + places, inside[None, :], other=0.0)


@triton.jit
def _adapt(given, partial, b, bias_ptr, gain_ptr, has_terms, column, inside):
    """given: what the product is, [TILE, columns]."""
    given = given.to(tl.float32)
    sums = tl.sum(partial, axis=0)
    total = given + tl.dot(sums.to(b.dtype), b, input_precision="tf32x3")
    if has_terms:
        bias = tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + column, inside, other=0.0).to(tl.float32)
        total += given * gain[None, :] + bias[None, :]
    return total


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _expand(
    product_ptr, partial_ptr, b_ptr, bias_ptr, gain_ptr, rows_ptr, tiles_ptr,
    out_features, b_stride, bias_stride, piece_stride, first_end, second_end,
    PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of the product's columns, for one tile. Parts end at first_end, second_end and
    out_features; programs of a part begin at its first column."""
    if PDL:
        start_next()
    tile = tl.program_id(1)
    kind = tl.load(tiles_ptr + tile)
    place = tile * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + place)
    if (kind == 0) | (tl.max(row, axis=0) < 0):  # both, so that both are asked for at once
        if PDL:
            wait_previous()
        return
    block = tl.program_id(0)
    second_block = tl.cdiv(first_end, COLUMNS)
    third_block = second_block + tl.cdiv(second_end - first_end, COLUMNS)
    in_second, in_third = block >= second_block, block >= third_block
    part = in_second.to(tl.int32) + in_third.to(tl.int32)
    first = tl.where(in_third, second_end, tl.where(in_second, first_end, 0))
    end = tl.where(in_third, out_features, tl.where(in_second, second_end, first_end))
    block -= tl.where(in_third, third_block, tl.where(in_second, second_block, 0))
    column = first + block * COLUMNS + tl.arange(0, COLUMNS)
    inside, is_own = column < end, row >= 0
    slot = (kind // 2).to(tl.int64)
    b_ptr += slot * b_stride
    bias_ptr += slot * bias_stride
    gain_ptr += slot * bias_stride
    if PDL:
        _prefetch_b(b_ptr, first + block * COLUMNS, end, RANK, COLUMNS)
        after = wait_previous()
        partial_ptr += after
        product_ptr += after
    product_ptr += row.to(tl.int64)[:, None] * out_features + column[None, :]
    in_product = is_own[:, None] & inside[None, :]
    given = tl.load(product_ptr, in_product, other=0.0)
    partial = _load_partial(partial_ptr, place, part, is_own, piece_stride, PARTS, RANK, PIECES)
    b = _load_b(b_ptr, column, inside, RANK)
    total = _adapt(given, partial, b, bias_ptr, gain_ptr, kind % 2 != 0, column, inside)
    tl.store(product_ptr, total.to(product_ptr.dtype.element_ty), in_product)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _expand_swiglu(
    product_ptr, out_ptr, partial_ptr, b_ptr, bias_ptr, gain_ptr, rows_ptr, tiles_ptr,
    size, b_stride, bias_stride, piece_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some of the `size` columns of out, for one tile; also where its slot has nothing here."""
    if PDL:
        start_next()
    tile = tl.program_id(1)
    kind = tl.load(tiles_ptr + tile)
    place = tile * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + place)
    if tl.max(row, axis=0) < 0:
        if PDL:
            wait_previous()
        return
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside, is_row = column < size, row >= 0
    is_own, has_b = is_row & (kind != 0), inside & (kind != 0)
    slot = (kind // 2).to(tl.int64)
    b_ptr += slot * b_stride
    bias_ptr += slot * bias_stride
    gain_ptr += slot * bias_stride
    if PDL:
        _prefetch_b(b_ptr, first, size, RANK, COLUMNS)
        _prefetch_b(b_ptr, size + first, 2 * size, RANK, COLUMNS)
        after = wait_previous()
        partial_ptr += after
        product_ptr += after
        out_ptr += after
    row = row.to(tl.int64)[:, None]
    in_out = is_row[:, None] & inside[None, :]
    product_ptr += row * (2 * size) + column[None, :]
    gate = tl.load(product_ptr, in_out, other=0.0)
    up = tl.load(product_ptr + size, in_out, other=0.0)
    partial = _load_partial(partial_ptr, place, 0, is_own, piece_stride, PARTS, RANK, PIECES)
    up_partial = partial
    if PARTS == 2:
        up_partial = _load_partial(partial_ptr, place, 1, is_own, piece_stride, PARTS, RANK, PIECES)
    b = _load_b(b_ptr, column, has_b, RANK)
    up_b = _load_b(b_ptr, size + column, has_b, RANK)
    has_terms = kind % 2 != 0
    gate = _adapt(gate, partial, b, bias_ptr, gain_ptr, has_terms, column, inside)
    up = _adapt(up, up_partial, up_b, bias_ptr, gain_ptr, has_terms, size + column, inside)
    out = gate / (1 + tl.exp(-gate)) * up
    out_ptr += row * size + column[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), in_out)


def expand(
    product: torch.Tensor, partial: torch.Tensor, weights: LoRAWeights, rows: AdapterRows
) -> torch.Tensor:
    """The product [T, out], contiguous, with what became of the partial sums, in place."""
    pieces, _, num_parts, rank = partial.shape
    sizes, (num_tiles, tile) = weights.sizes, rows.rows.shape
    assert 1 <= num_parts <= 3 and product.is_contiguous()
    num_blocks = sum(triton.cdiv(size, EXPAND_COLUMNS) for size in sizes)
    _expand[(num_blocks, num_tiles)](
        product, partial, weights.b, weights.bias, weights.gain, rows.rows,
        rows.tiles[weights.index], sum(sizes), weights.b.stride(0), weights.bias.stride(0),
        partial.stride(0), sizes[0], sum(sizes[:2]),
        PARTS=num_parts, RANK=rank, PIECES=pieces, TILE=tile, COLUMNS=EXPAND_COLUMNS,
        num_warps=EXPAND_WARPS, **launch_flags(product.device),
    )  # fmt: skip
    return product


def expand_swiglu(
    product: torch.Tensor, partial: torch.Tensor, weights: LoRAWeights, rows: AdapterRows
) -> torch.Tensor:
    """`expand`, and silu of a row's first half, times the second: [T, out / 2], a new tensor."""
    pieces, _, num_parts, rank = partial.shape
    (num_tiles, tile), size = rows.rows.shape, product.shape[1] // 2
    assert weights.sizes in ((2 * size,), (size, size)) and product.is_contiguous()
    out = product.new_empty((len(product), size))
    _expand_swiglu[(triton.cdiv(size, GATED_COLUMNS), num_tiles)](
        product, out, partial, weights.b, weights.bias, weights.gain, rows.rows,
        rows.tiles[weights.index], size, weights.b.stride(0), weights.bias.stride(0),
        partial.stride(0), PARTS=num_parts, RANK=rank, PIECES=pieces, TILE=tile,
        COLUMNS=GATED_COLUMNS, num_warps=EXPAND_WARPS, **launch_flags(product.device),
    )  # fmt: skip
    return out
