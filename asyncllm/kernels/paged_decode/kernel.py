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

TILE = 64  # keys that a program takes at a time
TILE_ELEMENTS = 8192  # its head_dims together, at most: two tiles in flight are then 64 KiB
PROGRAMS_PER_SM = 4  # some resident, some to follow: rows of different lengths then balance
MAX_SPLITS = 64  # one program merges them in one go
MAX_GROUP = 32  # query heads of a program: what registers and a 4090's on-chip memory hold
MIN_DOT = 16  # the least side of a tensor-core product
FP8_FACTORS = {torch.float8_e4m3fn: 2.0**8, torch.float8_e5m2: 1.0}  # of what `_halves` gives
NUM_WARPS, NUM_STAGES = 4, 3  # stages: two tiles in flight
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
def add_tile(scores, values, best, total, acc):
    """The same after a tile: scores [HEADS, TILE], of each head one finite; values [TILE, DIM]."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return new_best, total, acc


@triton.jit
def add_sink(sinks, best, total, acc):
    """The same after a score of each head that has no value: sinks [HEADS], of base 2."""
    new_best = tl.maximum(best, sinks)
    shrink = tl.exp2(best - new_best)
    return new_best, total * shrink + tl.exp2(sinks - new_best), acc * shrink[:, None]


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
def _halves(words, E5M2: tl.constexpr):
    """FP8 numbers, four to a word, as float16: [TILE, N] -> [TILE, 4 * N]. Those of E4M3 times
    2**-8, as its exponents count from 7 and float16's from 15; a NaN is a number. Of four the
    middle ones change places (`_dim`). Converted as operands of a product, they would be read from
    shared memory byte by byte."""
    words = words.to(tl.uint32, bitcast=True)
    pairs = tl.join(words << 8, words)  # the first and third of four, the second and fourth
    if E5M2:
        pairs &= 0xFF00FF00
    else:
        pairs = (pairs & 0x80008000) | ((pairs & 0x7F007F00) >> 1)
    bits = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return tl.reshape(bits, (words.shape[0], 4 * words.shape[1])).to(tl.float16, bitcast=True)


@triton.jit
def _dim(column, PER_WORD: tl.constexpr):
    """Of which dimension of a head a column of q, k and v is."""
    if PER_WORD == 1:
        return column
    return (column & ~3) | ((column & 1) << 1) | ((column >> 1) & 1)


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
    PER_WORD: numbers to an element of the cache, whose strides are of elements: FP8 comes in words.
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
    column = _dim(tl.arange(0, DIM_PADDED), PER_WORD)
    head = kv_head * GROUP + member
    in_q = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    in_row = head[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(q_ptr + row * q_stride + in_row, in_q, other=0.0)
    if PER_WORD > 1:
        q = q.to(tl.float16)
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + head, member < GROUP, other=0.0) * LOG2_E

    WORDS: tl.constexpr = HEAD_DIM // PER_WORD  # of a head
    word = tl.arange(0, DIM_PADDED // PER_WORD)
    cache = cache_ptr + kv_head * WORDS + word[None, :]
    table = tables_ptr + row * table_stride
    token = start * TILE + tl.arange(0, TILE)
    page = tl.load(table + token // BLOCK_SIZE, token < length, other=0)
    best, total, acc = start_softmax(GROUP_PADDED, DIM_PADDED)
    for _ in range(start, end):
        seen = token < length
        distance = token - (length - 1)
        if WINDOW is not None:
            seen &= token >= length - WINDOW
        offset = (token % BLOCK_SIZE) * (NUM_KV_HEADS * WORDS)
        key = cache + (page.to(tl.int64) * page_stride + offset)[:, None]
        in_cache = seen[:, None] & (word < WORDS)[None, :]
        k = tl.load(key, in_cache, other=0)  # [TILE, DIM_PADDED], or its words
        v = tl.load(key + kv_stride, in_cache, other=0)
        # The next tile's pages already: its keys can then be fetched while this one is computed.
        token += TILE
        page = tl.load(table + token // BLOCK_SIZE, token < length, other=0)

        if PER_WORD > 1:
            k, v = _halves(k, E5M2), _halves(v, E5M2)
        scores = scaled_scores(tl.dot(q, tl.trans(k)), scale_log2, SOFT_CAP_LOG2)
        if HAS_SLOPES:
            scores += slopes[:, None] * distance[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Finite from the first tile on: every tile of a split holds a key that is seen.
        best, total, acc = add_tile(scores, v, best, total, acc)

    if HAS_SINKS:  # once in a row: in its first split
        has_sink = (member < GROUP) & (split == 0)
        sinks = tl.load(sinks_ptr + head, has_sink, other=float("-inf")).to(tl.float32)
        best, total, acc = add_sink(sinks * LOG2_E, best, total, acc)
    acc = acc * v_scale / total[:, None]
    if WHOLE:
        tl.store(out_ptr + row * out_stride + in_row, acc.to(out_ptr.dtype.element_ty), in_q)
    else:
        part = (row * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, in_q)
        tl.store(lse_ptr + part, best + tl.log2(total), member < GROUP)


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
    dim_padded = max(MIN_DOT, triton.next_power_of_2(head_dim))
    tile = min(TILE, TILE_ELEMENTS // dim_padded)
    num_splits = _num_splits(
        num_rows * num_groups, block_tables.shape[1] * block_size, window, tile, num_sms
    )
    k_scale, v_scale = kv_scales
    per_word = 1
    if cache.dtype in FP8_FACTORS:
        k_scale, v_scale = (scale * FP8_FACTORS[cache.dtype] for scale in kv_scales)
        per_word = 4
    elements = cache.view(torch.int32) if per_word == 4 else cache
    partial = lse = None
    if num_splits > 1:
        parts = (num_rows, num_heads, num_splits)
        partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    _attend_split[(num_groups, num_rows, num_splits)](
        q, elements, block_tables, positions, sinks, slopes, out, partial, lse,
        q.stride(0), block_tables.stride(0), elements.stride(0), elements.stride(1), out.stride(0),
        scale * k_scale * LOG2_E, v_scale, num_splits,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=group_padded,
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, BLOCK_SIZE=block_size,
        TILE=tile, WINDOW=window, SOFT_CAP_LOG2=soft_cap_log2(soft_cap),
        HAS_SINKS=sinks is not None, HAS_SLOPES=slopes is not None,
        LOG2_E=LOG2_E, WHOLE=num_splits == 1, PER_WORD=per_word,
        E5M2=cache.dtype == torch.float8_e5m2,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
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
