"""LoRA's two small products in Triton, for tokens of different adapters: shrink, then expand.

    shrink   partial[k, t, p] = a[slot of t, part p][:, k] @ x[t, k]      k: a piece of the features
    replace  product[t, features] = whole[slot of t] @ x[t]               of slots that have it
    expand   product[t, part p] += gain * product + b[slot of t, part p] @ sum of partials + bias

A program works for one slot on a tile of tokens and ends at once where none of them has it: tokens
need no order, nothing is planned, and a captured graph replays as it is. A token's sum is added up
in one order, whatever its neighbours are. Of the adapters only those that tokens have are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import LoRAWeights

MIN_DOT = 16  # the least side of a tensor-core product
MAX_TOKENS = 64  # of a tile
SHRINK_COLUMNS = 128  # of x, at a time
WHOLE_COLUMNS = 64  # of x, at a time
WHOLE_FEATURES = 64  # of a whole weight, to a program
MAX_PIECES = 16  # of x's columns, a program each
EXPAND_COLUMNS = 128  # of the product, to a program


@triton.jit
def _shrink(
    x_ptr, a_ptr, slots_ptr, partial_ptr, num_tokens, in_features, a_stride, piece_columns,
    PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A piece of x's columns, for one part and slot. partial: float32 [pieces, T, PARTS, RANK]."""
    if PDL:
        start_next()
    piece, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    slot = tl.program_id(2) + 1
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_own = tl.load(slots_ptr + token, token < num_tokens, other=0) == slot
    if tl.sum(is_own.to(tl.int32), axis=0) == 0:
        return
    if PDL:
        after = wait_previous()
        x_ptr += after
        partial_ptr += after
    rank = tl.arange(0, RANK)
    a_ptr += slot.to(tl.int64) * a_stride + (part * RANK + rank)[None, :] * in_features
    x_ptr += token.to(tl.int64)[:, None] * in_features
    sums = tl.zeros((TOKENS, RANK), tl.float32)
    end = tl.minimum((piece + 1) * piece_columns, in_features)
    for start in range(piece * piece_columns, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        x = tl.load(x_ptr + column[None, :], is_own[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_ptr + column[:, None], inside[:, None], other=0.0)  # [COLUMNS, RANK]
        sums = tl.dot(x, a, sums, input_precision="ieee")
    place = ((piece * num_tokens + token).to(tl.int64) * PARTS + part) * RANK
    tl.store(partial_ptr + place[:, None] + rank[None, :], sums, is_own[:, None])


@triton.jit
def _expand(
    partial_ptr, b_ptr, bias_ptr, gain_ptr, slots_ptr, product_ptr, num_tokens, out_features,
    b_stride, bias_stride, num_pieces, first_end, second_end,
    PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A piece of the product's columns, for one slot. Parts end at first_end, second_end and
    out_features; programs of a part begin at its first column."""
    if PDL:
        start_next()
    slot = tl.program_id(2) + 1
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_own = tl.load(slots_ptr + token, token < num_tokens, other=0) == slot
    if tl.sum(is_own.to(tl.int32), axis=0) == 0:
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
    rank = tl.arange(0, RANK)
    b_ptr += slot.to(tl.int64) * b_stride
    b = tl.load(b_ptr + column[None, :] * RANK + rank[:, None], (column < end)[None, :], other=0.0)
    of_column = slot.to(tl.int64) * bias_stride + column
    bias = tl.load(bias_ptr + of_column, column < end, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + of_column, column < end, other=0.0).to(tl.float32)
    if PDL:
        after = wait_previous()
        partial_ptr += after
        product_ptr += after
    place = (token.to(tl.int64) * PARTS + part) * RANK
    partial_ptr += place[:, None] + rank[None, :]
    sums = tl.zeros((TOKENS, RANK), tl.float32)
    for piece in range(num_pieces):
        offset = (piece + tl.zeros((), tl.int64)) * num_tokens * (PARTS * RANK)
        sums += tl.load(partial_ptr + offset, is_own[:, None], other=0.0)
    delta = tl.dot(sums.to(b.dtype), b, input_precision="ieee") + bias[None, :]
    product_ptr += token.to(tl.int64)[:, None] * out_features + column[None, :]
    inside = is_own[:, None] & (column < end)[None, :]
    total = tl.load(product_ptr, inside, other=0.0).to(tl.float32)
    total += total * gain[None, :] + delta
    tl.store(product_ptr, total.to(product_ptr.dtype.element_ty), inside)


@triton.jit
def _replace(
    x_ptr, weight_ptr, is_there_ptr, slots_ptr, product_ptr, num_tokens, in_features, features,
    product_stride, weight_stride, is_there_stride,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some features of a tile of tokens, for one slot. product_ptr: at the first feature."""
    if PDL:
        start_next()
    slot = tl.program_id(2) + 1
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_own = tl.load(slots_ptr + token, token < num_tokens, other=0) == slot
    if tl.sum(is_own.to(tl.int32), axis=0) == 0:
        return
    if tl.load(is_there_ptr + slot.to(tl.int64) * is_there_stride) == 0:
        return
    if PDL:
        after = wait_previous()
        x_ptr += after
        product_ptr += after
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < features
    weight_ptr += slot.to(tl.int64) * weight_stride + feature.to(tl.int64)[None, :] * in_features
    x_ptr += token.to(tl.int64)[:, None] * in_features
    sums = tl.zeros((TOKENS, FEATURES), tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        given = column < in_features
        x = tl.load(x_ptr + column[None, :], is_own[:, None] & given[None, :], other=0.0)
        weight = tl.load(weight_ptr + column[:, None], given[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    product_ptr += token.to(tl.int64)[:, None] * product_stride + feature[None, :]
    rounded = sums.to(product_ptr.dtype.element_ty)
    tl.store(product_ptr, rounded, is_own[:, None] & inside[None, :])


def shrink(x: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor) -> torch.Tensor:
    """The partial sums, float32 [pieces, T, parts, max_rank], of x [T, in], contiguous."""
    num_tokens, in_features = x.shape
    num_slots, _, rank = weights.b.shape
    num_parts = len(weights.sizes)
    assert x.is_contiguous()
    tokens, tiles = _tile(num_tokens)
    piece_columns, num_pieces = _pieces(in_features, tiles)
    partial = x.new_empty((num_pieces, num_tokens, num_parts, rank), dtype=torch.float32)
    _shrink[(num_pieces * num_parts, tiles, num_slots - 1)](
        x, weights.a, slots, partial, num_tokens, in_features, weights.a.stride(0), piece_columns,
        PARTS=num_parts, RANK=rank, TOKENS=tokens, COLUMNS=SHRINK_COLUMNS,
        **launch_flags(x.device),
    )  # fmt: skip
    return partial


def expand(
    product: torch.Tensor, partial: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor
) -> None:
    """Add what became of the partial sums to the product [T, out], contiguous."""
    num_pieces, num_tokens, num_parts, rank = partial.shape
    sizes = weights.sizes
    assert 1 <= num_parts <= 3 and product.is_contiguous()
    tokens, tiles = _tile(num_tokens)
    num_blocks = sum(triton.cdiv(size, EXPAND_COLUMNS) for size in sizes)
    _expand[(num_blocks, tiles, len(weights.b) - 1)](
        partial, weights.b, weights.bias, weights.gain, slots, product, num_tokens, sum(sizes),
        weights.b.stride(0), weights.bias.stride(0), num_pieces, sizes[0], sum(sizes[:2]),
        PARTS=num_parts, RANK=rank, TOKENS=tokens, COLUMNS=EXPAND_COLUMNS,
        **launch_flags(product.device),
    )  # fmt: skip


def replace(
    product: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor
) -> None:
    """In the product [T, out], contiguous: what tokens' slots have whole weights for."""
    num_tokens, in_features = x.shape
    assert x.is_contiguous() and product.is_contiguous()
    tokens, tiles = _tile(num_tokens)
    for whole in weights.whole:
        num_slots, features, _ = whole.weight.shape
        _replace[(triton.cdiv(features, WHOLE_FEATURES), tiles, num_slots - 1)](
            x, whole.weight, whole.is_there, slots, product[:, whole.first :], num_tokens,
            in_features, features, product.stride(0), whole.weight.stride(0),
            whole.is_there.stride(0), TOKENS=tokens, FEATURES=WHOLE_FEATURES,
            COLUMNS=WHOLE_COLUMNS, **launch_flags(product.device),
        )  # fmt: skip


def _tile(num_tokens: int) -> tuple[int, int]:
    """Tokens of a program, and how many programs have all."""
    tokens = min(max(triton.next_power_of_2(num_tokens), MIN_DOT), MAX_TOKENS)
    return tokens, triton.cdiv(num_tokens, tokens)


def add_lora_triton(
    product: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, slots: torch.Tensor
) -> torch.Tensor:
    """An `AddLoRA`."""
    replace(product, x, weights, slots)
    expand(product, shrink(x, weights, slots), weights, slots)
    return product


def _pieces(in_features: int, tiles: int) -> tuple[int, int]:
    """Columns of each piece of x, and how many pieces: many where there are few tokens."""
    blocks = triton.cdiv(in_features, SHRINK_COLUMNS)
    num_pieces = max(1, min(MAX_PIECES // tiles, blocks // 2))
    columns = triton.cdiv(blocks, num_pieces) * SHRINK_COLUMNS
    return columns, triton.cdiv(in_features, columns)
