"""Rows gathered from the engines of one host in one kernel, by the memory of kernel.py.

A row is a few tensors' words of 32 bits, beside each other: [set][engine][ROW_WORDS]. Its sets take
turns as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.all_reduce import MAX_TENSORS, RowGather
from asyncllm.kernels.all_reduce.kernel import EMPTY, SETS, num_warps, wait_for
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous

NAN_WORD = tl.constexpr(0x7FFF7FFF)  # of a float32, and of two halves


@triton.jit
def _send(
    x_ptr, peers, at, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    words = tl.load(x_ptr + row * WIDTH + column, column < WIDTH, other=0)
    words = tl.where(words == EMPTY, NAN_WORD, words)
    inside = (column < WIDTH) & (tl.arange(0, RANKS)[:, None] < RANKS)
    tl.store(peers + at + column, tl.broadcast_to(words, (RANKS, BLOCK)), inside)


@triton.jit
def _receive(
    out_ptr, own, closed, row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    RANKS: tl.constexpr, ROW_WORDS: tl.constexpr,
):  # fmt: skip
    source = tl.arange(0, RANKS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (column < WIDTH) & (source < RANKS)
    words = wait_for(own + source * ROW_WORDS + column, inside, closed)
    tl.store(out_ptr + (source * num_rows + row) * WIDTH + column, words, inside)


@triton.jit(do_not_specialize=["rank"])
def _gather_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, a_out_ptr, b_out_ptr, c_out_ptr, d_out_ptr, e_out_ptr,
    peers_ptr, calls_ptr, rank, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr,
    ROW_WORDS: tl.constexpr, ROW_BLOCK: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row of this engine, and of this number of the others, to a program. A to E: words of a row
    of each tensor, 0: there is none; of all but the first at most SMALL."""
    if PDL:
        start_next()
        after = wait_previous()
        a_ptr += after
        calls_ptr += after
        a_out_ptr += after
        if B:
            b_ptr += after
            b_out_ptr += after
        if C:
            c_ptr += after
            c_out_ptr += after
        if D:
            d_ptr += after
            d_out_ptr += after
        if E:
            e_ptr += after
            e_out_ptr += after
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    source = tl.arange(0, RANKS)[:, None]
    peers = tl.multiple_of(tl.load(peers_ptr + source).to(tl.pointer_type(tl.int32)), (16, 16))
    own = tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int32)), 16)
    closed = tl.load(peers_ptr + RANKS).to(tl.pointer_type(tl.int32))
    calls_ptr += row
    call = tl.load(calls_ptr)
    now = (row * SETS + call) * (RANKS * ROW_WORDS)
    before = (row * SETS + (call + 2) % SETS) * (RANKS * ROW_WORDS)
    at = now + rank * ROW_WORDS
    _send(a_ptr, peers, at, row, A, BLOCK, RANKS)
    if B:
        _send(b_ptr, peers, at + A, row, B, SMALL, RANKS)
    if C:
        _send(c_ptr, peers, at + A + B, row, C, SMALL, RANKS)
    if D:
        _send(d_ptr, peers, at + A + B + C, row, D, SMALL, RANKS)
    if E:
        _send(e_ptr, peers, at + A + B + C + D, row, E, SMALL, RANKS)
    column = tl.arange(0, ROW_BLOCK)[None, :]
    everywhere = (column < ROW_WORDS) & (source < RANKS)
    empty = tl.full((RANKS, ROW_BLOCK), EMPTY, tl.int32)
    tl.store(own + before + source * ROW_WORDS + column, empty, everywhere)
    own += now
    _receive(a_out_ptr, own, closed, row, num_rows, A, BLOCK, RANKS, ROW_WORDS)
    if B:
        _receive(b_out_ptr, own + A, closed, row, num_rows, B, SMALL, RANKS, ROW_WORDS)
    if C:
        _receive(c_out_ptr, own + A + B, closed, row, num_rows, C, SMALL, RANKS, ROW_WORDS)
    if D:
        _receive(d_out_ptr, own + A + B + C, closed, row, num_rows, D, SMALL, RANKS, ROW_WORDS)
    if E:
        _receive(e_out_ptr, own + A + B + C + D, closed, row, num_rows, E, SMALL, RANKS, ROW_WORDS)
    tl.store(calls_ptr, (call + 1) % SETS)  # all threads have read it: they met while waiting


def gather_rows(tensors: tuple[torch.Tensor, ...], gather: RowGather) -> list[torch.Tensor]:
    """[rows, n] each -> [ranks * rows, n], in the order of the ranks. An integer of -1, or floats
    of the same bits, do not arrive."""
    num_rows = len(tensors[0])
    assert all(each.is_contiguous() for each in tensors)
    made = [each.new_empty((gather.num_ranks * num_rows, each.shape[1])) for each in tensors]
    nothing = (None,) * (MAX_TENSORS - len(tensors))
    words = [each.view(torch.int32) for each in tensors]
    widths = [each.shape[1] for each in words] + [0] * len(nothing)
    block = triton.next_power_of_2(widths[0])
    warps = num_warps(2 * block)  # a word is two numbers
    # A thread has one word of each tensor at least: copies of a word in two warps would be polled
    # apart, and what one has seen told of the other (`wait_for`).
    small = max(*widths[1:], 32 * warps // gather.num_ranks)
    _gather_kernel[(num_rows,)](
        *words, *nothing, *(each.view(torch.int32) for each in made), *nothing,
        gather.peers, gather.calls, gather.rank, *widths, BLOCK=block,
        SMALL=triton.next_power_of_2(small), ROW_WORDS=gather.row_words,
        ROW_BLOCK=triton.next_power_of_2(gather.row_words), RANKS=gather.num_ranks,
        num_warps=warps, **launch_flags(made[0].device),
    )  # fmt: skip
    return made
