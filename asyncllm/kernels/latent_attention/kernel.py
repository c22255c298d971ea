"""Attention over pages of latents (MLA) in Triton: decodes and prompts, by one kernel.

All query heads see the same latent of a token: as their key whole, as their value its first part.
So a row's queries, heads and tokens alike, are one list, of which a program takes QUERIES; it reads
each latent once for all of them. A row of one token has so few programs that its tokens are cut
into splits, whose outputs a second kernel merges. Nothing is planned on the host, so a captured
graph replays as it is: a program finds its tiles from the row's length on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import Start
from asyncllm.kernels.paged_decode.kernel import LOG2_E, start_softmax
from asyncllm.kernels.records import AttentionLayer

TILE = 32  # tokens that a program takes at a time
DECODE_QUERIES, PREFILL_QUERIES = 16, 64  # of a program: what the registers of its warps hold
DECODE_WARPS, PREFILL_WARPS = 4, 8
PROGRAMS_PER_SM = 2
MAX_SPLITS = 64  # one program merges them in one go
MERGED_COLUMNS = 128  # of a program, at most: 64 numbers per thread, so that none spills


# Where a step's rows begin in their upload differs from step to step.
ROW_POINTERS = ["pages_ptr", "page_indptr", "query_indptr", "lengths_ptr"]


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=ROW_POINTERS)
def _attend(
    q_ptr, cache_ptr, pages_ptr, page_indptr, query_indptr, lengths_ptr, out_ptr, partial_ptr,
    lse_ptr, page_stride, scale_log2, num_splits,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr, ROTARY_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Some queries of a row, over one split of its tokens. WHOLE: there is no other split."""
    row = tl.program_id(1)
    split = tl.program_id(2)
    first_token = tl.load(query_indptr + row)
    num_tokens = tl.load(query_indptr + row + 1) - first_token
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    num_queries = num_tokens * NUM_HEADS
    if tl.program_id(0) * QUERIES >= num_queries:
        return
    length = tl.load(lengths_ptr + row).to(tl.int32)
    position = length - num_tokens + query // NUM_HEADS
    last = tl.minimum(tl.program_id(0) * QUERIES + QUERIES, num_queries) - 1
    num_tiles = tl.cdiv(length - num_tokens + last // NUM_HEADS + 1, TILE)
    per_split = tl.cdiv(num_tiles, num_splits)
    start = split * per_split
    end = tl.minimum(start + per_split, num_tiles)
    if start >= end:
        return

    SIZE: tl.constexpr = LATENT + ROTARY
    column = tl.arange(0, LATENT_PADDED)
    rotary = tl.arange(0, ROTARY_PADDED)
    is_query = (query < num_queries)[:, None]
    of_query = (first_token * NUM_HEADS + query).to(tl.int64)[:, None] * SIZE
    in_latent = (column < LATENT)[None, :]
    in_rotary = (rotary < ROTARY)[None, :]
    q_latent = tl.load(q_ptr + of_query + column[None, :], is_query & in_latent, other=0.0)
    q_rotary = tl.load(q_ptr + of_query + LATENT + rotary[None, :], is_query & in_rotary, other=0.0)
    table = pages_ptr + tl.load(page_indptr + row)
    best, total, acc = start_softmax(QUERIES, LATENT_PADDED)
    for tile in range(start, end):
        token = tile * TILE + tl.arange(0, TILE)
        is_token = (token < length)[:, None]
        page = tl.load(table + token // BLOCK_SIZE, token < length, other=0)
        base = cache_ptr + (page.to(tl.int64) * page_stride + token % BLOCK_SIZE * SIZE)[:, None]
        latent = tl.load(base + column[None, :], is_token & in_latent, other=0.0)
        rotated = tl.load(base + LATENT + rotary[None, :], is_token & in_rotary, other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent))
        scores = tl.dot(q_rotary, tl.trans(rotated), scores) * scale_log2
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        # A split may hold no token that an early query of a prompt sees; then its best is -inf.
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp2(best - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None])
        best = new_best

    acc = acc / total[:, None]
    if WHOLE:
        target = out_ptr + of_query + column[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), is_query & in_latent)
    else:  # rows of one token: a query is a head
        part = (row * NUM_HEADS + query) * num_splits + split
        target = partial_ptr + part.to(tl.int64)[:, None] * LATENT + column[None, :]
        tl.store(target, acc, is_query & in_latent)
        tl.store(lse_ptr + part, best + tl.log2(total), query < num_queries)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    partial_ptr, lse_ptr, lengths_ptr, out_ptr, num_splits,
    LATENT: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge some columns of one head of one row: the splits' outputs, weighted by their shares of
    the softmax's sum."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_tiles = tl.cdiv(tl.load(lengths_ptr + row).to(tl.int32), TILE)
    num_used = tl.cdiv(num_tiles, tl.cdiv(num_tiles, num_splits))
    split = tl.arange(0, MAX_SPLITS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_head = row * tl.num_programs(0) + head
    part = of_head * num_splits + split
    lse = tl.load(lse_ptr + part, split < num_used, other=float("-inf"))
    in_part = (split < num_used)[:, None] & (column < LATENT)[None, :]
    address = partial_ptr + part.to(tl.int64)[:, None] * LATENT + column[None, :]
    partial = tl.load(address, in_part, other=0.0)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    merged = tl.sum(weights[:, None] * partial, axis=0) / tl.sum(weights, axis=0)
    target = out_ptr + of_head.to(tl.int64) * SIZE + column
    tl.store(target, merged.to(out_ptr.dtype.element_ty), column < LATENT)


def attend_latents(
    layer: AttentionLayer,
    q: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    page_indptr: torch.Tensor,
    query_indptr: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    max_queries: int,
    max_len: int,
    num_sms: int,
) -> None:
    """Attention of each row's last tokens over its latents, into `out`; what is behind the values
    there is left alone.

    q, out: [tokens, heads, head_dim], contiguous. cache: [pages, block_size, head_dim], one
    layer's. Of row i: its pages from pages[page_indptr[i]] on, its tokens from query_indptr[i] to
    query_indptr[i + 1], in all lengths[i] tokens, its own included; all int32. max_queries: tokens
    of the row that has most. max_len: at least the longest row's, where that has one token.

    Only enqueues, and decides nothing by what the tensors hold: it may be captured.
    """
    assert layer.latent_dim is not None and layer.window is None
    num_rows, num_heads, size = len(lengths), layer.num_heads, layer.head_dim
    latent, is_decode = layer.latent_dim, max_queries == 1
    queries = DECODE_QUERIES if is_decode else PREFILL_QUERIES
    blocks = triton.cdiv(max_queries * num_heads, queries)
    num_splits = _num_splits(num_rows * blocks, max_len, num_sms) if is_decode else 1
    partial = lse = None
    if num_splits > 1:
        parts = (num_rows, num_heads, num_splits)
        partial = torch.empty((*parts, latent), dtype=torch.float32, device=q.device)
        lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    padded = triton.next_power_of_2(latent)
    _attend[(blocks, num_rows, num_splits)](
        q, cache, pages, page_indptr, query_indptr, lengths, out, partial, lse,
        cache.stride(0), layer.scale * LOG2_E, num_splits,
        NUM_HEADS=num_heads, LATENT=latent, LATENT_PADDED=padded, ROTARY=size - latent,
        ROTARY_PADDED=max(16, triton.next_power_of_2(size - latent)), BLOCK_SIZE=cache.shape[1],
        QUERIES=queries, TILE=TILE, WHOLE=num_splits == 1,
        num_warps=DECODE_WARPS if is_decode else PREFILL_WARPS, num_stages=2,
    )  # fmt: skip
    if num_splits > 1:
        columns = min(MERGED_COLUMNS, padded)
        _merge[(num_heads, num_rows, padded // columns)](
            partial, lse, lengths, out, num_splits, LATENT=latent, COLUMNS=columns,
            SIZE=size, TILE=TILE, MAX_SPLITS=MAX_SPLITS, num_warps=4,
        )  # fmt: skip


def _num_splits(num_units: int, max_len: int, num_sms: int) -> int:
    """Splits that fill the GPU with so many programs each; none without a tile."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, num_units)
    return min(wanted, triton.cdiv(max_len, TILE), MAX_SPLITS)


def prewarm(start: Start) -> Iterator[Callable[[], object]]:
    """Decodes in one split and in several, and prompts."""
    has_latents = any(layer.latent_dim is not None for layer in start.layers)
    if start.attention_backend == "flashinfer" and has_latents:
        yield from (
            partial(_attend_zeros, start, *each) for each in ((1, 1), (1, TILE + 1), (2, 2))
        )


def _attend_zeros(start: Start, num_tokens: int, max_len: int) -> None:
    layer, zeros = start.layers[0], start.zeros(2)
    q = start.zeros(num_tokens, layer.num_heads, layer.head_dim, dtype=start.dtype)
    attend_latents(
        layer, q, start.zeros(1, start.block_size, layer.head_dim, dtype=start.dtype), zeros,
        zeros, zeros, zeros[:1], torch.empty_like(q), max_queries=num_tokens, max_len=max_len,
        num_sms=1 << 10,
    )  # fmt: skip
