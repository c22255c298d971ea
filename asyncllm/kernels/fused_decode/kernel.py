"""From a layer's projection to its attention output in one Triton kernel, for few decoding rows.

It does what rope_kv_write and a decode kernel do one after the other, and saves their launch, a
round trip of q and the wait for the new key. Flash decoding as in paged_decode: tiles of keys
in splits by shapes alone, so a captured graph replays as it is. Here the splits of a
row and KV head count themselves, and the last to arrive merges them all, always in the same order.

The keys of earlier tokens were written by earlier steps, so the first tile is asked for before the
projection has ended (programmatic_launch.py). The new token's key and value never come from memory:
the program whose split holds them puts them into its tile, and writes them to their page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.online_softmax import (
    LOG2_E,
    add_sink,
    add_tile,
    scaled_scores,
    soft_cap_log2,
    start_softmax,
)
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import AttentionLayer, Rotation

MAX_GROUP = 16  # query heads of one KV head
TILE = 64  # keys that a program takes at a time
TILE_ELEMENTS = 8192  # its head_dims together, at most: a second tile is on its way meanwhile
MAX_SPLITS = 32
PROGRAMS_PER_SM = 2
MIN_DOT = 16  # the least side of a tensor-core product


@triton.jit
def _head_halves(source, weight_ptr, eps, cos, sin, HALF: tl.constexpr, PADDED: tl.constexpr,
                 HAS_NORM: tl.constexpr, mask):  # fmt: skip
    """Both halves of normalised, rotated heads: source [heads, 1] pointers -> [heads, PADDED]."""
    column = tl.arange(0, PADDED)[None, :]
    in_half = mask & (column < HALF)
    raw1 = tl.load(source + column, in_half, other=0.0)
    raw2 = tl.load(source + HALF + column, in_half, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(x1 * x1 + x2 * x2, axis=1)[:, None] / (2 * HALF)
        scale = tl.rsqrt(mean + eps)
        x1 *= scale * tl.load(weight_ptr + column, column < HALF, other=0.0).to(tl.float32)
        x2 *= scale * tl.load(weight_ptr + HALF + column, column < HALF, other=0.0).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(raw1.dtype)
    y2 = (x2 * cos + x1 * sin).to(raw1.dtype)
    return y1, y2


@triton.jit
def _load_tile(cache, table, token, is_old, page_stride, kv_stride, TOKEN_STRIDE: tl.constexpr,
               HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Earlier tokens [TILE]: both halves of keys [TILE, PADDED], values [TILE, 2 * PADDED]."""
    half = tl.arange(0, PADDED)
    column = tl.arange(0, 2 * PADDED)
    page = tl.load(table + token // BLOCK_SIZE, is_old, other=0)
    offset = page.to(tl.int64) * page_stride + (token % BLOCK_SIZE) * TOKEN_STRIDE
    key = cache + offset[:, None] + half[None, :]
    in_key = is_old[:, None] & (half < HALF)[None, :]
    k1 = tl.load(key, in_key, other=0.0)
    k2 = tl.load(key + HALF, in_key, other=0.0)
    value = cache + kv_stride + offset[:, None] + column[None, :]
    v = tl.load(value, is_old[:, None] & (column < 2 * HALF)[None, :], other=0.0)
    return k1, k2, v


@triton.jit
def _merge_splits(out, partial_ptr, lse_ptr, first_head, num_active, GROUP: tl.constexpr,
                  HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """The heads of a group, each from its splits' outputs by their parts of the softmax's sum.

    out: where the first of them goes; first_head: its number among those of all rows.
    """
    splits = tl.arange(0, SPLITS)
    column = tl.arange(0, 2 * PADDED)
    for m in tl.static_range(GROUP):
        base = (first_head + m) * SPLITS
        lse = tl.load(
            lse_ptr + base + splits, splits < num_active, other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        weights = tl.exp2(lse - tl.max(lse, axis=0))
        weights = weights / tl.sum(weights, axis=0)
        parts = tl.load(
            partial_ptr + (base + splits)[:, None] * HEAD_DIM + column[None, :],
            (splits < num_active)[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        merged = tl.sum(parts * weights[:, None], axis=0)
        tl.store(out + m * HEAD_DIM + column, merged.to(out.dtype.element_ty), column < HEAD_DIM)


@triton.jit(do_not_specialize=["num_splits"])
def _fused_decode(
    qkv_ptr, cache_ptr, tables_ptr, positions_ptr, rows_ptr, cos_sin_ptr, q_weight_ptr,
    k_weight_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr, counts_ptr,
    eps, scale_log2, table_stride, page_stride, kv_stride, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP_LOG2: tl.constexpr, HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr, SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # fastest: neighbours read neighbouring bytes of a page
    row = tl.program_id(1)
    split = tl.program_id(2)
    HEAD_DIM: tl.constexpr = 2 * HALF
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    position = tl.load(positions_ptr + row)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(position + 1 - WINDOW, 0) // TILE
    num_tiles = position // TILE + 1 - first
    per_split = tl.cdiv(num_tiles, num_splits)
    num_active = tl.cdiv(num_tiles, per_split)
    start = first + split * per_split
    end = tl.minimum(start + per_split, first + num_tiles)
    if PDL:
        start_next()
    if start >= end:
        return

    # Nothing here is written by this step, except the new key, which is masked.
    half = tl.arange(0, PADDED)
    column = tl.arange(0, 2 * PADDED)
    token = start * TILE + tl.arange(0, TILE)
    table = tables_ptr + row * table_stride
    cache = cache_ptr + kv_head * HEAD_DIM
    k1, k2, v = _load_tile(
        cache, table, token, token < position, page_stride, kv_stride, TOKEN_STRIDE, HALF, PADDED,
        BLOCK_SIZE,
    )  # fmt: skip
    angle = cos_sin_ptr + tl.load(rows_ptr + row).to(tl.int64) * HEAD_DIM + half[None, :]
    cos = tl.load(angle, (half < HALF)[None, :], other=0.0)
    sin = tl.load(angle + HALF, (half < HALF)[None, :], other=0.0)
    new_page = tl.load(table + position // BLOCK_SIZE).to(tl.int64)

    qkv = qkv_ptr + row.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    if PDL:
        after = wait_previous()
        qkv += after
        cache_ptr += after
        out_ptr += after
        partial_ptr += after
        lse_ptr += after
        counts_ptr += after
    member = tl.arange(0, GROUP_PADDED)
    head = kv_head * GROUP + member
    q1, q2 = _head_halves(
        qkv + (head * HEAD_DIM)[:, None], q_weight_ptr, eps, cos, sin, HALF, PADDED, HAS_NORM,
        (member < GROUP)[:, None],
    )  # fmt: skip
    new = qkv + (NUM_HEADS + kv_head) * HEAD_DIM
    one = tl.arange(0, 1)[:, None]
    new_k1, new_k2 = _head_halves(
        new + one, k_weight_ptr, eps, cos, sin, HALF, PADDED, HAS_NORM, one < 1
    )
    new_v = tl.load(new + NUM_KV_HEADS * HEAD_DIM + column, column < HEAD_DIM, other=0.0)[None, :]
    if end == first + num_tiles:
        target = cache_ptr + kv_head * HEAD_DIM + new_page * page_stride
        target += (position % BLOCK_SIZE) * TOKEN_STRIDE
        tl.store(target + half[None, :], new_k1, (half < HALF)[None, :])
        tl.store(target + HALF + half[None, :], new_k2, (half < HALF)[None, :])
        tl.store(target + kv_stride + column[None, :], new_v, (column < HEAD_DIM)[None, :])

    best, total, acc = start_softmax(GROUP_PADDED, 2 * PADDED)
    for _ in range(start, end):
        is_new = (token == position)[:, None]
        tile_k1 = tl.where(is_new, new_k1, k1)
        tile_k2 = tl.where(is_new, new_k2, k2)
        tile_v = tl.where(is_new, new_v, v)
        seen = token <= position
        if WINDOW is not None:
            seen &= token > position - WINDOW
        # The next tile is asked for before this one is computed.
        token += TILE
        k1, k2, v = _load_tile(
            cache, table, token, (token < position) & (token < end * TILE), page_stride, kv_stride,
            TOKEN_STRIDE, HALF, PADDED, BLOCK_SIZE,
        )  # fmt: skip

        scores = tl.dot(q1, tl.trans(tile_k1))
        scores = tl.dot(q2, tl.trans(tile_k2), scores)  # [GROUP_PADDED, TILE]
        scores = scaled_scores(scores, scale_log2, SOFT_CAP_LOG2)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Finite from the first tile on: every tile of a split holds a key that is seen.
        best, total, acc = add_tile(scores, tile_v, best, total, acc)

    if HAS_SINKS:  # once in a row: in its first split
        has_sink = (member < GROUP) & (split == 0)
        sinks = tl.load(sinks_ptr + head, has_sink, other=float("-inf")).to(tl.float32)
        best, total, acc = add_sink(sinks * LOG2_E, best, total, acc)
    in_out = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    in_row = head[:, None] * HEAD_DIM + column[None, :]
    acc = acc / total[:, None]
    out = out_ptr + row.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    if num_active == 1:
        tl.store(out + in_row, acc.to(out_ptr.dtype.element_ty), in_out)
    else:
        part = (row * NUM_HEADS + head) * SPLITS + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, in_out)
        tl.store(lse_ptr + part, best + tl.log2(total), member < GROUP)
        tl.debug_barrier()  # all of the program's stores come before its count
        count = counts_ptr + row * NUM_KV_HEADS + kv_head
        if tl.atomic_add(count, 1, sem="acq_rel") == num_active - 1:
            tl.store(count, 0)  # for the next layer
            _merge_splits(
                out + kv_head * GROUP * HEAD_DIM, partial_ptr, lse_ptr,
                row * NUM_HEADS + kv_head * GROUP, num_active, GROUP, HEAD_DIM, PADDED, SPLITS,
            )  # fmt: skip


class FusedDecode:
    """The kernel with its workspace. Launches must not overlap."""

    def __init__(
        self, layer: AttentionLayer, max_rows: int, num_sms: int, device: torch.device
    ) -> None:
        """`layer`: any, of which the heads and head_dim count."""
        self._max_rows = max_rows
        self._num_sms = num_sms
        self._group = layer.num_heads // layer.num_kv_heads
        self._has_slopes = layer.slopes is not None
        parts = (max_rows, layer.num_heads, MAX_SPLITS)
        self._partial = torch.empty((*parts, layer.head_dim), dtype=torch.float32, device=device)
        self._lse = torch.empty(parts, dtype=torch.float32, device=device)
        # Splits that are done, per row and KV head; each launch leaves zeros.
        self._counts = torch.zeros((max_rows, layer.num_kv_heads), dtype=torch.int32, device=device)
        self._launch_flags = launch_flags(device)

    def takes(self, num_rows: int) -> bool:
        return num_rows <= self._max_rows and self._group <= MAX_GROUP and not self._has_slopes

    def __call__(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        rotation: Rotation,
        cache: torch.Tensor,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """qkv, rotation and the result as `Attend`; cache: the layer's pages; block_tables: int32
        [rows, pages per sequence]; positions: int32 [rows], of the new tokens."""
        num_rows, _, head_dim = qkv.shape
        out = qkv.new_empty((num_rows, layer.num_heads * head_dim))
        group = self._group
        if num_splits is None:
            # All at once on the GPU, or a second wave would double the time.
            programs = PROGRAMS_PER_SM * self._num_sms // (num_rows * layer.num_kv_heads)
            num_splits = max(1, min(programs, MAX_SPLITS))
        dim_padded = 2 * max(MIN_DOT, triton.next_power_of_2(head_dim // 2))
        norm = layer.head_norm
        q_norm, k_norm = (norm.q_weight, norm.k_weight) if norm is not None else (None, None)
        _fused_decode[(layer.num_kv_heads, num_rows, num_splits)](
            qkv, cache, block_tables, positions, rotation.rows, rotation.cos_sin,
            q_norm, k_norm, layer.sinks, out, self._partial, self._lse, self._counts,
            norm.eps if norm is not None else 0.0, layer.scale * LOG2_E,
            block_tables.stride(0), cache.stride(0), cache.stride(1), num_splits,
            NUM_KV_HEADS=layer.num_kv_heads, GROUP=group,
            GROUP_PADDED=max(MIN_DOT, triton.next_power_of_2(group)),
            HALF=head_dim // 2, PADDED=dim_padded // 2,
            BLOCK_SIZE=cache.shape[2], TILE=min(TILE, TILE_ELEMENTS // dim_padded),
            WINDOW=layer.window, SOFT_CAP_LOG2=soft_cap_log2(layer.soft_cap),
            HAS_SINKS=layer.sinks is not None, LOG2_E=LOG2_E, SPLITS=MAX_SPLITS,
            HAS_NORM=norm is not None,
            num_warps=4, **self._launch_flags,
        )  # fmt: skip
        return out
