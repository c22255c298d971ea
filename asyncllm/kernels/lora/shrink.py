"""LoRA's first product in Triton: of each row with its adapter's `a`, for all parts at once.

    partial[piece, t, p] = a[slot of t, part p][:, piece] @ x[t, piece]        piece: of the columns

It is to be launched before the product that it belongs to, and behind a kernel that lets it begin
early (programmatic_launch.py): it reads its weights while that one ends, and so takes little time
of its own. A tile of few rows leaves most of the GPU idle but for many pieces; those are summed by
expand.py, in one order. Within a program each warp has a part of the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.lora.rows import FEW_ROWS_TILE
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import AdapterRows, LoRAWeights

SPLITS = 4  # of a chunk of columns: one to a warp
MOST_RANK = 64  # of a program: a larger one is as several parts
CHUNK_NUMBERS = 8192  # of a part's a, at a time
FEW_ROWS_CHUNK, MANY_ROWS_CHUNK = 512, 128  # columns, at most
PIECE_COLUMNS = 1024  # to a program, or more: of pieces there are at most
MANY_ROWS_PIECES = 4
MOST_PARTIAL = 8192  # and so many of their numbers to a program of expand


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _shrink(
    x_ptr, a_ptr, rows_ptr, tiles_ptr, partial_ptr, a_stride,
    SIZE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of x's columns, CHUNKS times COLUMNS, for one part and tile. partial: float32
    [pieces, tiles * TILE, PARTS, RANK]."""
    if PDL:
        start_next()
    piece, part, tile = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    kind = tl.load(tiles_ptr + tile)
    place = tile * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + place)
    if kind == 0:
        if PDL:
            wait_previous()
        return
    WIDTH: tl.constexpr = COLUMNS // SPLITS
    column = tl.arange(0, SPLITS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    column += piece * (CHUNKS * COLUMNS)
    rank = tl.arange(0, RANK)
    a_ptr += (kind // 2).to(tl.int64) * a_stride + (part * RANK + rank)[None, None, :] * SIZE
    is_row = (row >= 0)[None, :, None]
    x_ptr += row.to(tl.int64)[None, :, None] * SIZE
    sums = tl.zeros((SPLITS, TILE, RANK), tl.float32)
    if CHUNKS == 1:
        a = tl.load(a_ptr + column[:, :, None], (column < SIZE)[:, :, None], other=0.0)
    if PDL:
        after = wait_previous()
        x_ptr += after
        partial_ptr += after
    for _ in range(CHUNKS):
        x = tl.load(x_ptr + column[:, None, :], is_row & (column < SIZE)[:, None, :], other=0.0)
        if CHUNKS > 1:
            a = tl.load(a_ptr + column[:, :, None], (column < SIZE)[:, :, None], other=0.0)
        sums = tl.dot(x, a, sums, input_precision="tf32x3")
        column += COLUMNS
    place += piece * tl.num_programs(1) * TILE
    partial_ptr += (place.to(tl.int64) * PARTS + part)[:, None] * RANK + rank[None, :]
    tl.store(partial_ptr, tl.sum(sums, axis=0), (row >= 0)[:, None])


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _look_up(
    ids_ptr, a_ptr, rows_ptr, tiles_ptr, partial_ptr, a_stride, scale,
    RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kind = tl.load(tiles_ptr + tile)
    if kind == 0:
        return
    place, rank = tile * TILE + tl.arange(0, TILE), tl.arange(0, RANK)
    row = tl.load(rows_ptr + place)
    token = tl.load(ids_ptr + row, row >= 0, other=0).to(tl.int64)
    a_ptr += (kind // 2).to(tl.int64) * a_stride + token[:, None] * RANK + rank[None, :]
    shrunk = tl.load(a_ptr, (row >= 0)[:, None], other=0.0).to(tl.float32) * scale
    tl.store(partial_ptr + place[:, None] * RANK + rank[None, :], shrunk, (row >= 0)[:, None])


def look_up(
    token_ids: torch.Tensor, weights: LoRAWeights, rows: AdapterRows, scale: float
) -> torch.Tensor:
    """As `shrink` of one-hot vectors: [1, tiles * TILE, 1, max_rank]. An ordinary launch."""
    (num_tiles, tile), rank = rows.rows.shape, weights.b.shape[2]
    shape = 1, num_tiles * tile, 1, rank
    partial = weights.a.new_empty(shape, dtype=torch.float32)
    _look_up[(num_tiles,)](
        token_ids, weights.a, rows.rows, rows.tiles[weights.index], partial, weights.a.stride(0),
        scale, RANK=rank, TILE=tile,
    )  # fmt: skip
    return partial


def shrink(x: torch.Tensor, weights: LoRAWeights, rows: AdapterRows) -> torch.Tensor:
    """The partial sums, float32 [pieces, tiles * TILE, parts, max_rank], of x [T, in],
    contiguous."""
    size = x.shape[1]
    assert x.is_contiguous()
    (num_tiles, tile), num_parts, rank = rows.rows.shape, len(weights.sizes), weights.b.shape[2]
    columns, chunks, pieces = _pieces(size, rank, tile)
    shape = pieces, num_tiles * tile, num_parts, rank
    partial = x.new_empty(shape, dtype=torch.float32)
    part_rank = min(rank, MOST_RANK)
    num_parts *= rank // part_rank
    _shrink[(pieces * num_parts, num_tiles)](
        x, weights.a, rows.rows, rows.tiles[weights.index], partial, weights.a.stride(0),
        SIZE=size, PARTS=num_parts, RANK=part_rank, TILE=tile, COLUMNS=columns, CHUNKS=chunks,
        SPLITS=SPLITS, num_warps=SPLITS, **launch_flags(x.device),
    )  # fmt: skip
    return partial


def _pieces(size: int, rank: int, tile: int) -> tuple[int, int, int]:
    """Columns of a chunk, chunks of a piece, and pieces of x."""
    are_few = tile == FEW_ROWS_TILE
    most = FEW_ROWS_CHUNK if are_few else MANY_ROWS_CHUNK
    columns = max(16 * SPLITS, min(most, CHUNK_NUMBERS // min(rank, MOST_RANK)))
    pieces = min(triton.cdiv(size, PIECE_COLUMNS), MOST_PARTIAL // (tile * rank))
    pieces = max(1, pieces if are_few else min(pieces, MANY_ROWS_PIECES))
    chunks = triton.cdiv(triton.cdiv(size, pieces), columns)
    return columns, chunks, triton.cdiv(size, columns * chunks)
