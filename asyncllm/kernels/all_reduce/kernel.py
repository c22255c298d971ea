"""Sums over ranks in one kernel, which writes to the other ranks' memory and waits for theirs.

A number says by itself whether it is there: memory holds EMPTY, a NaN that no product gives, until
a rank writes to it. So a sum costs one way through NVLink, and no barrier.

    call e of a row   write own numbers to set e % 3 of every rank
                      empty set (e + 2) % 3 of own memory, which call e - 1 has read
                      wait until nothing in set e % 3 is EMPTY, and add up in the order of ranks

Nobody writes to a set before it is empty: for call e + 2 a rank needs our numbers of call e + 1,
which follow the emptying. A row counts its own calls, as steps differ in their rows.

    one shot    each rank gets all rows of the others: [set][rank][size]
    two shots   each rank sums a part of the columns for all, [set][rank][size / ranks], and tells
                the others, [set][part][size / ranks]: fewer bytes from four ranks on,
                and fewer that are waited for at a time

Which rows another rank's kernel does first is of no account if all ranks do them in the same order,
as a GPU starts programs by their number. `closed` ends the waiting: another rank is gone then, and
the sums mean nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.all_reduce import RowSums
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous

COLUMNS_PER_WARP = 512  # 16 numbers to a thread
MAX_WARPS = 16
SETS = tl.constexpr(3)
EMPTY = tl.constexpr(-1)
NAN_HALF = tl.constexpr(0x7FFF)
# Between looks at `closed`, which is host memory: half a microsecond passes from one warp's look to
# the next one's, of all programs. The looks of all must take less time than lies between them, else
# two ranks keep each other waiting from then on (docs/log/ranks.md).
POLLS = tl.constexpr(1 << 14)


@triton.jit
def wait_for(ptr, inside, closed_ptr):
    """The numbers' bits, [n, m] of them, when all are there. One to a thread at least."""
    bits = tl.load(ptr, inside, other=0, volatile=True)
    num_missing = tl.sum(tl.sum((bits == EMPTY).to(tl.int32), axis=1), axis=0)
    polls = 0
    while num_missing > 0:
        bits = tl.load(ptr, inside, other=0, volatile=True)
        num_missing = tl.sum(tl.sum((bits == EMPTY).to(tl.int32), axis=1), axis=0)
        polls += 1
        if polls % POLLS == 0:
            num_missing *= (tl.load(closed_ptr, volatile=True) == 0).to(tl.int32)
    return bits


@triton.jit
def _bits(x):
    """The numbers that are sent: never EMPTY."""
    bits = x.to(tl.int16, bitcast=True)
    return tl.where(bits == EMPTY, tl.full(bits.shape, NAN_HALF, tl.int16), bits)


@triton.jit
def sum_of_ranks(
    x_ptr, peers_ptr, calls_ptr, row, rank,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, TWO_SHOTS: tl.constexpr,
    SCATTERS: tl.constexpr = False,
):  # fmt: skip
    """[BLOCK] in float32, rounded to x's dtype: the sum of all ranks' x_ptr[row, :SIZE].

    SCATTERS: x has as many rows for each rank as there are programs; the sum is that of this
    rank's rows.
    peers_ptr: int64 addresses of the ranks' memory, then of `closed`; calls_ptr: int32 [rows].
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    source = tl.arange(0, RANKS)[:, None]
    peers = tl.load(peers_ptr + source).to(tl.pointer_type(tl.int16))
    peers = tl.multiple_of(peers, (16, 16))
    own = tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int16)), 16)
    closed = tl.load(peers_ptr + RANKS).to(tl.pointer_type(tl.int32))
    calls_ptr += row
    call = tl.load(calls_ptr)
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < SIZE
    x_ptr += row * SIZE
    if TWO_SHOTS:
        PART: tl.constexpr = SIZE // RANKS
        PART_BLOCK: tl.constexpr = BLOCK // RANKS
        now = (row * SETS + call) * (2 * SIZE)
        before = (row * SETS + (call + 2) % SETS) * (2 * SIZE)
        at = tl.arange(0, PART_BLOCK)[None, :]
        in_part = (at < PART) & (source < RANKS)
        x = tl.load(x_ptr + source * PART + at, in_part, other=0.0)
        tl.store(peers + now + rank * PART + at, _bits(x), in_part)
        empty = tl.full((1, BLOCK), EMPTY, tl.int16)
        tl.store(own + before + column, empty, inside)
        tl.store(own + before + SIZE + column, empty, inside)
        bits = wait_for(own + now + source * PART + at, in_part, closed)
        part = tl.sum(bits.to(dtype, bitcast=True).to(tl.float32), axis=0).to(dtype)
        sent = tl.broadcast_to(_bits(part)[None, :], (RANKS, PART_BLOCK))
        tl.store(peers + now + SIZE + rank * PART + at, sent, in_part)
        found = wait_for(own + now + SIZE + column, inside, closed)
        total = tl.sum(found.to(dtype, bitcast=True).to(tl.float32), axis=0)
    else:
        now = (row * SETS + call) * (RANKS * SIZE)
        before = (row * SETS + (call + 2) % SETS) * (RANKS * SIZE)
        everywhere = inside & (source < RANKS)
        if SCATTERS:
            of_rank = source.to(tl.int64) * tl.num_programs(0) * SIZE
            sent = _bits(tl.load(x_ptr + of_rank + column, everywhere, other=0.0))
        else:
            x = tl.load(x_ptr + column, inside, other=0.0)
            sent = tl.broadcast_to(_bits(x), (RANKS, BLOCK))
        tl.store(peers + now + rank * SIZE + column, sent, everywhere)
        empty = tl.full((RANKS, BLOCK), EMPTY, tl.int16)
        tl.store(own + before + source * SIZE + column, empty, everywhere)
        bits = wait_for(own + now + source * SIZE + column, everywhere, closed)
        total = tl.sum(bits.to(dtype, bitcast=True).to(tl.float32), axis=0)
        total = total.to(dtype).to(tl.float32)
    tl.store(calls_ptr, (call + 1) % SETS)  # all threads have read it: they met while waiting
    return total


@triton.jit
def _all_reduce_kernel(
    x_ptr, out_ptr, peers_ptr, calls_ptr, rank, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    RANKS: tl.constexpr, TWO_SHOTS: tl.constexpr, SCATTERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row to a program."""
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        out_ptr += after
        calls_ptr += after
    row = tl.program_id(0)
    total = sum_of_ranks(
        x_ptr, peers_ptr, calls_ptr, row, rank, SIZE, BLOCK, RANKS, TWO_SHOTS, SCATTERS
    )
    column = tl.arange(0, BLOCK)
    at = out_ptr + row.to(tl.int64) * SIZE + column
    tl.store(at, total.to(out_ptr.dtype.element_ty), column < SIZE)


def all_reduce(x: torch.Tensor, sums: RowSums) -> None:
    """In place: x [T, size] becomes the sum of all ranks' x."""
    _launch(x, x, sums, scatters=False)


def reduce_scatter(x: torch.Tensor, sums: RowSums) -> torch.Tensor:
    """[ranks * T, size] -> [T, size]: this rank's rows of the sum of all ranks' x, in one shot."""
    out = x.new_empty((len(x) // sums.num_ranks, x.shape[1]))
    _launch(x, out, sums, scatters=True)
    return out


def _launch(x: torch.Tensor, out: torch.Tensor, sums: RowSums, scatters: bool) -> None:
    assert x.is_contiguous()
    size, block = x.shape[1], triton.next_power_of_2(x.shape[1])
    _all_reduce_kernel[(len(out),)](
        x, out, sums.peers, sums.calls, sums.rank, SIZE=size, BLOCK=block, RANKS=sums.num_ranks,
        TWO_SHOTS=sums.in_two_shots, SCATTERS=scatters, num_warps=num_warps(block),
        **launch_flags(x.device),
    )  # fmt: skip


def num_warps(block: int) -> int:
    return max(1, min(block // COLUMNS_PER_WARP, MAX_WARPS))
