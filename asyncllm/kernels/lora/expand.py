"""LoRA's second product in Triton: what was shrunk, times the adapter's `b`, added to the product.

    product[t, part p] += gain * product + b[slot of t, part p] @ shrunk[t, p] + bias

What was shrunk is the sum of shrink.py's partial sums. Or the product itself has it, of all slots,
as columns behind its own (models/layers/lora.py); then the result is a new tensor without these.

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
GATED_COLUMNS = 64  # of each of its halves
EXPAND_WARPS = 4
LINE = tl.constexpr(64)  # numbers of 16 bits in 128 bytes


@triton.jit
def _prefetch_b(b_ptr, first, end, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for a slot's b of some columns."""
    line = first * RANK + tl.arange(0, COLUMNS * RANK // LINE) * LINE
    prefetch(b_ptr + tl.minimum(line, end * RANK - 1))


@triton.jit
def _load_shrunk(
    shrunk_ptr, place, row, slot, part, is_own, stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Read what was shrunk of the rows at these places, not summed yet: [PIECES, TILE, RANK].
    stride: from piece to piece, or, where the product has it, from row to row."""
    rank = tl.arange(0, RANK)[None, None, :]
    if PIECES == 0:
        offset = row.to(tl.int64) * stride + ((slot - 1) * PARTS + part) * RANK
        shrunk_ptr += offset[None, :, None] + rank
        is_there = is_own[None, :, None]
    else:
        piece = tl.arange(0, triton.next_power_of_2(PIECES))[:, None, None]
        offset = ((place.to(tl.int64) * PARTS + part) * RANK)[None, :, None]
        shrunk_ptr += piece * stride + offset + rank
        is_there = (piece < PIECES) & is_own[None, :, None]
    return tl.load(shrunk_ptr, is_there, other=0.0)


@triton.jit
def _load_b(b_ptr, column, inside, RANK: tl.constexpr):
    """Read a slot's b of some columns: [RANK, columns]."""
    places = column[None, :] * RANK + tl.arange(0, RANK)[:, None]
    return tl.load(b_ptr + places, inside[None, :], other=0.0)


@triton.jit
def _adapt(given, shrunk, b, bias_ptr, gain_ptr, has_terms, column, inside):
    """given: what the product is, [TILE, columns]."""
    given = given.to(tl.float32)
    sums = tl.sum(shrunk, axis=0)
    total = given + tl.dot(sums.to(b.dtype), b, input_precision="tf32x3")
    if has_terms:
        bias = tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + column, inside, other=0.0).to(tl.float32)
        total += given * gain[None, :] + bias[None, :]
    return total


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _expand(
    product_ptr, out_ptr, shrunk_ptr, b_ptr, bias_ptr, gain_ptr, rows_ptr, tiles_ptr,
    out_features, product_stride, b_stride, bias_stride, shrunk_stride, first_end, second_end,
    PARTS: tl.constexpr, RANK: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of the product's columns, for one tile. Parts end at first_end, second_end and
    out_features; programs of a part begin at its first column. Where the product has what was
    shrunk (PIECES is 0), rows without an adapter are copied to `out`; else they are there."""
    if PDL:
        start_next()
    tile = tl.program_id(1)
    kind = tl.load(tiles_ptr + tile)
    place = tile * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + place)
    if ((kind == 0) & (PIECES > 0)) | (tl.max(row, axis=0) < 0):  # both are asked for at once
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
    inside, is_row = column < end, row >= 0
    is_own = is_row & (kind != 0)
    slot = (kind // 2).to(tl.int64)
    b_ptr += slot * b_stride
    bias_ptr += slot * bias_stride
    gain_ptr += slot * bias_stride
    if PDL:
        _prefetch_b(b_ptr, first + block * COLUMNS, end, RANK, COLUMNS)
        after = wait_previous()
        shrunk_ptr += after
        product_ptr += after
        out_ptr += after
    in_out = is_row[:, None] & inside[None, :]
    its_row = row.to(tl.int64)[:, None]
    given = tl.load(product_ptr + its_row * product_stride + column[None, :], in_out, other=0.0)
    shrunk = _load_shrunk(
        shrunk_ptr, place, row, slot, part, is_own, shrunk_stride, PARTS, RANK, PIECES
    )
    b = _load_b(b_ptr, column, inside & (kind != 0), RANK)
    total = _adapt(given, shrunk, b, bias_ptr, gain_ptr, kind % 2 != 0, column, inside)
    out_ptr += its_row * out_features + column[None, :]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), in_out)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _expand_swiglu(
    product_ptr, out_ptr, shrunk_ptr, b_ptr, bias_ptr, gain_ptr, rows_ptr, tiles_ptr,
    size, product_stride, b_stride, bias_stride, shrunk_stride,
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
        shrunk_ptr += after
        product_ptr += after
        out_ptr += after
    its_row = row.to(tl.int64)[:, None]
    in_out = is_row[:, None] & inside[None, :]
    product_ptr += its_row * product_stride + column[None, :]
    gate = tl.load(product_ptr, in_out, other=0.0)
    up = tl.load(product_ptr + size, in_out, other=0.0)
    shrunk = _load_shrunk(
        shrunk_ptr, place, row, slot, 0, is_own, shrunk_stride, PARTS, RANK, PIECES
    )
    up_shrunk = shrunk
    if PARTS == 2:
        up_shrunk = _load_shrunk(
            shrunk_ptr, place, row, slot, 1, is_own, shrunk_stride, PARTS, RANK, PIECES
        )
    b = _load_b(b_ptr, column, has_b, RANK)
    up_b = _load_b(b_ptr, size + column, has_b, RANK)
    has_terms = kind % 2 != 0
    gate = _adapt(gate, shrunk, b, bias_ptr, gain_ptr, has_terms, column, inside)
    up = _adapt(up, up_shrunk, up_b, bias_ptr, gain_ptr, has_terms, size + column, inside)
    out = gate / (1 + tl.exp(-gate)) * up
    out_ptr += its_row * size + column[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), in_out)


def _shrunk_of(
    product: torch.Tensor, partial: torch.Tensor | None, weights: LoRAWeights
) -> tuple[torch.Tensor, int, int]:
    """Where what was shrunk begins, and its `shrunk_stride` and PIECES."""
    if partial is None:
        return product[:, weights.b.shape[1] :], product.stride(0), 0
    return partial, partial.stride(0), len(partial)


def expand(
    product: torch.Tensor, partial: torch.Tensor | None, weights: LoRAWeights, rows: AdapterRows
) -> torch.Tensor:
    """The product [T, out], contiguous, with what became of the partial sums, in place. None: the
    product has what was shrunk behind `out`; returns a new tensor."""
    sizes, (num_tiles, tile), rank = weights.sizes, rows.rows.shape, weights.b.shape[2]
    assert 1 <= len(sizes) <= 3 and product.is_contiguous()
    out = product if partial is not None else product.new_empty(len(product), sum(sizes))
    shrunk, stride, pieces = _shrunk_of(product, partial, weights)
    num_blocks = sum(triton.cdiv(size, EXPAND_COLUMNS) for size in sizes)
    _expand[(num_blocks, num_tiles)](
        product, out, shrunk, weights.b, weights.bias, weights.gain, rows.rows,
        rows.tiles[weights.index], sum(sizes), product.stride(0), weights.b.stride(0),
        weights.bias.stride(0), stride, sizes[0], sum(sizes[:2]),
        PARTS=len(sizes), RANK=rank, PIECES=pieces, TILE=tile, COLUMNS=EXPAND_COLUMNS,
        num_warps=EXPAND_WARPS, **launch_flags(product.device),
    )  # fmt: skip
    return out


def expand_swiglu(
    product: torch.Tensor, partial: torch.Tensor | None, weights: LoRAWeights, rows: AdapterRows
) -> torch.Tensor:
    """`expand`, and silu of a row's first half, times the second: [T, out / 2], a new tensor."""
    (num_tiles, tile), (out_features, rank) = rows.rows.shape, weights.b.shape[1:]
    size = out_features // 2
    assert weights.sizes in ((2 * size,), (size, size)) and product.is_contiguous()
    out = product.new_empty((len(product), size))
    shrunk, stride, pieces = _shrunk_of(product, partial, weights)
    _expand_swiglu[(triton.cdiv(size, GATED_COLUMNS), num_tiles)](
        product, out, shrunk, weights.b, weights.bias, weights.gain, rows.rows,
        rows.tiles[weights.index], size, product.stride(0), weights.b.stride(0),
        weights.bias.stride(0), stride, PARTS=len(weights.sizes), RANK=rank, PIECES=pieces,
        TILE=tile, COLUMNS=GATED_COLUMNS, num_warps=EXPAND_WARPS, **launch_flags(product.device),
    )  # fmt: skip
    return out
