"""Paged decode attention in Triton, for the GPUs and shapes that balanced_decode is not for.

Flash decoding: a row's keys are cut into tiles and the tiles into splits, one program each,
whose outputs a second kernel merges. The number of splits follows from shapes alone, and a
program finds its tiles from the row's length on the device. So there is no plan, and a captured
graph replays as it is. A program serves the query heads of one KV head together (more than
MAX_GROUP, in parts): each key is read once.

    tiles of 64, 4 splits, 700 keys:          |0 1 2|3 4 5|6 7 8|9 10|
                           a window of 300:               |6 7|8 9|10|nothing: returns at once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE, NUM_WARPS = 64, 4  # keys that a program takes at a time
FP8_TILE, FP8_NUM_WARPS = 32, 2
TILE_ELEMENTS = 8192  # its head_dims together, at most: two tiles in flight are then 64 KiB
PROGRAMS_PER_SM = 4  # some resident, some to follow: rows of different lengths then balance
MAX_SPLITS = 64  # one program merges them in one go
MAX_GROUP = 32  # query heads of a program: what registers and a 4090's on-chip memory hold
MIN_DOT = 16  # the least side of a tensor-core product
PER_WORD = 4  # numbers in FP8
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
LOG2_E = 1.4426950408889634  # scores are of base 2: their scale has this factor


# The softmax a tile of keys at a time. A program keeps, for each of its query heads, the largest
# score so far, the sum of exp2(score - best), and the values weighted so, which shrink when a
# larger score comes.
@triton.jit
def start_softmax(HEADS: tl.constexpr, DIM: tl.constexpr):
    """(best [HEADS], total [HEADS], acc [HEADS, DIM]), before the first tile."""
    best = tl.full([HEADS], float("-inf"), tl.float32)
    return best, tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, DIM], tl.float32)


@triton.jit
def weigh_tile(scores, best, total):
    """Returns best and total after a tile, by how much acc shrinks [HEADS, 1], and the weights of
    the tile's values. scores [HEADS, TILE]: of each head one is finite."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    return new_best, total * shrink + tl.sum(weights, axis=1), shrink[:, None], weights


@triton.jit
def add_sink(sinks, best, total):
    """Returns best and total after a score of each head that has no value, and by how much acc
    shrinks [HEADS]. sinks [HEADS]: of base 2."""
    new_best = tl.maximum(best, sinks)
    shrink = tl.exp2(best - new_best)
    return new_best, total * shrink + tl.exp2(sinks - new_best), shrink


@triton.jit
def scaled_scores(products, scale_log2, SOFT_CAP_LOG2: tl.constexpr):
    """Scores of base 2 from q times k. SOFT_CAP_LOG2: of base 2, too, or None."""
    scores = products * scale_log2
    if SOFT_CAP_LOG2 is not None:  # tanh(x) = 2 * sigmoid(2 * x) - 1
        scores = (2 * tl.sigmoid(scores * (2 / SOFT_CAP_LOG2)) - 1) * SOFT_CAP_LOG2
    return scores


def soft_cap_log2(soft_cap: float | None) -> float | None:
    """A layer's soft cap, of base 2."""
    return None if soft_cap is None else soft_cap * LOG2_E


@triton.jit
def _to_half(q):
    """In float16, without infinities; a NaN stays one."""
    clamped = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return clamped.to(tl.float16)


@triton.jit
def _piece(words, PIECE: tl.constexpr, E5M2: tl.constexpr):
    """The number at PIECE of each word of four FP8 numbers, as float16. Bytes would be read from
    shared memory one by one, as operands of a product."""
    bits = (words.to(tl.uint32, bitcast=True) >> (8 * PIECE)).to(tl.uint8)
    if E5M2:
        return bits.to(tl.float8e5, bitcast=True).to(tl.float16)
    return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _tiles(length, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile that a row of `length` keys sees, and how many it sees."""
    first = 0
    if WINDOW is not None:
        first = tl.maximum(length - WINDOW, 0) // TILE
    return first, tl.cdiv(length, TILE) - first


@triton.jit(do_not_specialize=["num_splits"])
def _attend_split(
    q_ptr, cache_ptr, tables_ptr, positions_ptr, sinks_ptr, slopes_ptr, out_ptr, partial_ptr,
    lse_ptr, q_stride, table_stride, page_stride, kv_stride, out_stride, scale_log2, v_scale,
    num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP_LOG2: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr, LOG2_E: tl.constexpr, WHOLE: tl.constexpr, PER_WORD: tl.constexpr,
    E5M2: tl.constexpr,
):  # fmt: skip
    """One split of a row and group of heads. WHOLE: there is no other, this is the row's output.

    PER_WORD: numbers to an element of the cache, whose strides are of elements: 1, or 4 in FP8.
    Then q, values and outputs are in four pieces, each of every fourth dimension.
    """
    group = tl.program_id(0)  # fastest: neighbours read neighbouring bytes of a page
    row = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions_ptr + row) + 1
    first, num_tiles = _tiles(length, TILE, WINDOW)
    per_split = tl.cdiv(num_tiles, num_splits)
    start = first + split * per_split
    end = tl.minimum(start + per_split, first + num_tiles)
    if start >= end:
        return

    parts: tl.constexpr = tl.cdiv(GROUP, GROUP_PADDED)
    kv_head = group // parts
    member = group % parts * GROUP_PADDED + tl.arange(0, GROUP_PADDED)
    WORDS: tl.constexpr = HEAD_DIM // PER_WORD
    word = tl.arange(0, DIM_PADDED // PER_WORD)
    head = kv_head * GROUP + member
    in_q = (member < GROUP)[:, None] & (word < WORDS)[None, :]
    in_row = head[:, None] * HEAD_DIM + word[None, :] * PER_WORD
    q_ptr += row * q_stride + in_row
    q = tl.load(q_ptr, in_q, other=0.0)
    if PER_WORD == 4:
        q = _to_half(q)
        q1 = _to_half(tl.load(q_ptr + 1, in_q, other=0.0))
        q2 = _to_half(tl.load(q_ptr + 2, in_q, other=0.0))
        q3 = _to_half(tl.load(q_ptr + 3, in_q, other=0.0))
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + head, member < GROUP, other=0.0) * LOG2_E

    cache = cache_ptr + kv_head * WORDS + word[None, :]
    table = tables_ptr + row * table_stride
    token = start * TILE + tl.arange(0, TILE)
    page = tl.load(table + token // BLOCK_SIZE, token < length, other=0)
    best, total, acc = start_softmax(GROUP_PADDED, DIM_PADDED // PER_WORD)
    if PER_WORD == 4:
        acc1, acc2, acc3 = acc, acc, acc
    for _ in range(start, end):
        seen = token < length
        distance = token - (length - 1)
        if WINDOW is not None:
            seen &= token >= length - WINDOW
        offset = (token % BLOCK_SIZE) * (NUM_KV_HEADS * WORDS)
        key = cache + (page.to(tl.int64) * page_stride + offset)[:, None]
        in_cache = seen[:, None] & (word < WORDS)[None, :]
        k = tl.load(key, in_cache, other=0)  # [TILE, DIM_PADDED], or their words
        v = tl.load(key + kv_stride, in_cache, other=0)
        # The next tile's pages already: its keys can then be fetched while this one is computed.
        token += TILE
        page = tl.load(table + token // BLOCK_SIZE, token < length, other=0)

        if PER_WORD == 1:
            products = tl.dot(q, tl.trans(k))
        else:
            products = tl.dot(q, tl.trans(_piece(k, 0, E5M2)))
            products = tl.dot(q1, tl.trans(_piece(k, 1, E5M2)), products)
            products = tl.dot(q2, tl.trans(_piece(k, 2, E5M2)), products)
            products = tl.dot(q3, tl.trans(_piece(k, 3, E5M2)), products)
        scores = scaled_scores(products, scale_log2, SOFT_CAP_LOG2)
        if HAS_SLOPES:
            scores += slopes[:, None] * distance[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Finite from the first tile on: every tile of a split holds a key that is seen.
        best, total, shrink, weights = weigh_tile(scores, best, total)
        weights = weights.to(q.dtype)
        if PER_WORD == 1:
            acc = tl.dot(weights, v, acc * shrink)
        else:
            acc = tl.dot(weights, _piece(v, 0, E5M2), acc * shrink)
            acc1 = tl.dot(weights, _piece(v, 1, E5M2), acc1 * shrink)
            acc2 = tl.dot(weights, _piece(v, 2, E5M2), acc2 * shrink)
            acc3 = tl.dot(weights, _piece(v, 3, E5M2), acc3 * shrink)

    if HAS_SINKS:  # once in a row: in its first split
        has_sink = (member < GROUP) & (split == 0)
        sinks = tl.load(sinks_ptr + head, has_sink, other=float("-inf")).to(tl.float32)
        best, total, shrink = add_sink(sinks * LOG2_E, best, total)
        v_scale *= shrink
    factor = (v_scale / total)[:, None]
    if WHOLE:
        to_ptr = out_ptr + row * out_stride + in_row
    else:
        part = (row * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        to_ptr = partial_ptr + part[:, None] * HEAD_DIM + word[None, :] * PER_WORD
        tl.store(lse_ptr + part, best + tl.log2(total), member < GROUP)
    tl.store(to_ptr, (acc * factor).to(to_ptr.dtype.element_ty), in_q)
    if PER_WORD == 4:
        tl.store(to_ptr + 1, (acc1 * factor).to(to_ptr.dtype.element_ty), in_q)
        tl.store(to_ptr + 2, (acc2 * factor).to(to_ptr.dtype.element_ty), in_q)
        tl.store(to_ptr + 3, (acc3 * factor).to(to_ptr.dtype.element_ty), in_q)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits(
    partial_ptr, lse_ptr, positions_ptr, out_ptr, out_stride, num_splits,
    HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MAX_SPLITS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One head of one row: its splits' outputs, weighted by their parts of the softmax's sum."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(positions_ptr + row) + 1
    _, num_tiles = _tiles(length, TILE, WINDOW)
    num_used = tl.cdiv(num_tiles, tl.cdiv(num_tiles, num_splits))
    split = tl.arange(0, MAX_SPLITS)
    column = tl.arange(0, DIM_PADDED)
    used = split < num_used
    in_head = column < HEAD_DIM
    part = (row * tl.num_programs(0) + head) * num_splits + split
    lse = tl.load(lse_ptr + part, used, other=float("-inf"))
    partial = tl.load(
        partial_ptr + part[:, None] * HEAD_DIM + column[None, :],
        used[:, None] & in_head[None, :],
        other=0.0,
    )
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    merged = tl.sum(weights[:, None] * partial, axis=0) / tl.sum(weights, axis=0)
    target = out_ptr + row * out_stride + head * HEAD_DIM + column
    tl.store(target, merged.to(out_ptr.dtype.element_ty), in_head)


def paged_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    num_sms: int,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    slopes: torch.Tensor | None = None,
) -> None:
    """Attention of one query token per row over its pages, into `out`.

    q, out: [rows, heads, head_dim] in half precision. Rows may be strided; the last two dimensions
    are contiguous. cache: [pages, 2, block_size, kv_heads, head_dim], one layer's, contiguous.
    block_tables: int32 [rows, pages per sequence]. positions: int32 [rows]: a row sees the keys up
    to its own position; `window`: the last so many of them. soft_cap, sinks, slopes: see
    `AttentionLayer`. kv_scales: by which what the pages have in FP8 is multiplied.

    Only enqueues, and decides nothing by what the tensors hold: it may be captured.
    """
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.shape[2:4]
    group = num_heads // num_kv_heads
    group_padded = min(MAX_GROUP, max(MIN_DOT, triton.next_power_of_2(group)))
    num_groups = num_kv_heads * triton.cdiv(group, group_padded)
    is_fp8 = cache.dtype in FP8_DTYPES
    per_word = PER_WORD if is_fp8 else 1
    elements = cache.view(torch.int32) if is_fp8 else cache
    dim_padded = max(MIN_DOT * per_word, triton.next_power_of_2(head_dim))
    tile = min(FP8_TILE if is_fp8 else TILE, TILE_ELEMENTS // dim_padded)
    num_splits = _num_splits(
        num_rows * num_groups, block_tables.shape[1] * block_size, window, tile, num_sms
    )
    partial = lse = None
    if num_splits > 1:
        parts = (num_rows, num_heads, num_splits)
        partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    _attend_split[(num_groups, num_rows, num_splits)](
        q, elements, block_tables, positions, sinks, slopes, out, partial, lse,
        q.stride(0), block_tables.stride(0), elements.stride(0), elements.stride(1), out.stride(0),
        scale * kv_scales[0] * LOG2_E, kv_scales[1], num_splits,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=group_padded,
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=block_size,
        TILE=tile, WINDOW=window, SOFT_CAP_LOG2=soft_cap_log2(soft_cap),
        HAS_SINKS=sinks is not None, HAS_SLOPES=slopes is not None,
        LOG2_E=LOG2_E, WHOLE=num_splits == 1, PER_WORD=per_word,
        E5M2=cache.dtype == torch.float8_e5m2,
        num_warps=FP8_NUM_WARPS if is_fp8 else NUM_WARPS, num_stages=3,  # two tiles in flight
    )  # fmt: skip
    if num_splits > 1:
        _merge_splits[(num_heads, num_rows)](
            partial, lse, positions, out, out.stride(0), num_splits,
            HEAD_DIM=head_dim, DIM_PADDED=dim_padded, MAX_SPLITS=MAX_SPLITS,
            TILE=tile, WINDOW=window, num_warps=4,
        )  # fmt: skip


def _num_splits(num_units: int, max_len: int, window: int | None, tile: int, num_sms: int) -> int:
    """Splits that fill the GPU with `num_units` = rows x groups of heads; none without a tile."""
    max_tiles = triton.cdiv(max_len, tile)
    if window is not None:
        max_tiles = min(max_tiles, triton.cdiv(window, tile) + 1)  # it may begin within a tile
    return min(triton.cdiv(PROGRAMS_PER_SM * num_sms, num_units), max_tiles, MAX_SPLITS)
