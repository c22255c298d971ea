"""The recurrences in Triton: rows of a step side by side, the tokens of one row in order.

A program has a tile of one row's state in registers, moves it on token by token, and writes it back
to the row's slot. Steps of decodes are bound by reading and writing the states: many small tiles.
In a prompt's row the state is also written to the rows of its snapshots, after their tokens.

    state of a scan        [channels, N]: a tile of channels; each needs all of b and c
    state of a delta rule  [Dk, Dv] of a head: a tile of columns; each needs all of q and k

A convolution's tokens do not wait for each other: its outputs are a program for each token, and the
states, which are its last inputs, are written behind them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from asyncllm.kernels.recurrent.records import (
    Convolution,
    DeltaRule,
    Recurrence,
    SelectiveScan,
)

SCAN_CHANNELS = 16  # of a tile, at most
DELTA_COLUMNS = 16
CONV_CHANNELS = 128
NUM_WARPS = 4
# Rows begin anywhere in a step's upload: no variants by alignment.
ROW_POINTERS = ["slots_ptr", "indptr_ptr", "starts_ptr", "ends_ptr", "saves_ptr", "token_rows_ptr"]


class Rows(NamedTuple):
    """Rows of a step, int32. Row i is in `slots[i]` and has pieces indptr[i] to indptr[i + 1].

    A piece is tokens from `starts` to `ends`, at least one; `saves`: the row of the state memory
    that keeps what comes out of it, 0 for none. Where each row is one token (`indptr` None), the
    row's number is the token's.
    """

    slots: torch.Tensor  # [rows]
    indptr: torch.Tensor | None = None  # [rows + 1]
    starts: torch.Tensor | None = None  # [pieces]
    ends: torch.Tensor | None = None
    saves: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None  # [tokens]: the row of each


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def _scan(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, out_ptr, states_ptr, slots_ptr, indptr_ptr,
    starts_ptr, ends_ptr, saves_ptr, x_stride, dt_stride, b_stride, c_stride, state_stride,
    HEAD_DIM: tl.constexpr, GROUP_CHANNELS: tl.constexpr, CHANNELS: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr, HAS_D: tl.constexpr,
    A_OF_ENTRIES: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head, entry = channel // HEAD_DIM, tl.arange(0, BLOCK_N)
    group = tl.program_id(1) * TILE // GROUP_CHANNELS
    inside = entry < N
    slot = tl.load(slots_ptr + row)
    places = channel[:, None] * N + entry[None, :]
    whole = (channel < CHANNELS)[:, None] & inside[None, :]
    state_ptr = states_ptr + slot.to(tl.int64) * state_stride + places
    state = tl.load(state_ptr, whole, other=0.0)
    if A_OF_ENTRIES:
        a = tl.load(a_ptr + head[:, None] * N + entry[None, :], whole, other=0.0)
    else:
        a = tl.load(a_ptr + head)[:, None]
    if HAS_D:
        d = tl.load(d_ptr + head).to(tl.float32)
    b_ptr += group * N + entry
    c_ptr += group * N + entry
    first, last = row, row + 1
    if not ONE_TOKEN:
        first, last = tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1)
    for piece in range(first, last):
        start, end = piece, piece + 1
        if not ONE_TOKEN:
            start, end = tl.load(starts_ptr + piece), tl.load(ends_ptr + piece)
        for t in range(start, end):
            token = t + tl.zeros((), tl.int64)
            x = tl.load(x_ptr + token * x_stride + channel).to(tl.float32)
            dt = tl.load(dt_ptr + token * dt_stride + head).to(tl.float32)
            b = tl.load(b_ptr + token * b_stride, inside, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + token * c_stride, inside, other=0.0).to(tl.float32)
            state = tl.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b[None, :]
            out = tl.sum(state * c[None, :], axis=1)
            if HAS_D:
                out += d * x
            tl.store(out_ptr + token * CHANNELS + channel, out)
        if not ONE_TOKEN:
            save = tl.load(saves_ptr + piece).to(tl.int64)
            tl.store(states_ptr + save * state_stride + places, state, whole & (save != 0))
    tl.store(state_ptr, state, whole & (slot != 0))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def _delta_rule(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, states_ptr, slots_ptr, indptr_ptr, starts_ptr,
    ends_ptr, saves_ptr, q_stride, k_stride, v_stride, g_stride, beta_stride, state_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, TILE: tl.constexpr, G_OF_ROWS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    k_entry = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_key, is_column = k_entry < DK, column < DV
    slot = tl.load(slots_ptr + row)
    places = (head * DK + k_entry[:, None]) * DV + column[None, :]
    whole = is_key[:, None] & is_column[None, :]
    state_ptr = states_ptr + slot.to(tl.int64) * state_stride + places
    state = tl.load(state_ptr, whole, other=0.0)
    first, last = row, row + 1
    if not ONE_TOKEN:
        first, last = tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1)
    for piece in range(first, last):
        start, end = piece, piece + 1
        if not ONE_TOKEN:
            start, end = tl.load(starts_ptr + piece), tl.load(ends_ptr + piece)
        for t in range(start, end):
            token = t + tl.zeros((), tl.int64)
            at = key_head * DK + k_entry
            q = tl.load(q_ptr + token * q_stride + at, is_key, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + token * k_stride + at, is_key, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + token * v_stride + head * DV + column, is_column, other=0.0)
            beta = tl.load(beta_ptr + token * beta_stride + head).to(tl.float32)
            if G_OF_ROWS:
                g = tl.load(g_ptr + token * g_stride + head * DK + k_entry, is_key, other=0.0)
                state *= tl.exp(g.to(tl.float32))[:, None]
            else:
                state *= tl.exp(tl.load(g_ptr + token * g_stride + head).to(tl.float32))
            delta = (v.to(tl.float32) - tl.sum(k[:, None] * state, axis=0)) * beta
            state += k[:, None] * delta[None, :]
            out = tl.sum(q[:, None] * state, axis=0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * (HEADS * DV) + head * DV + column, out, is_column)
        if not ONE_TOKEN:
            save = tl.load(saves_ptr + piece).to(tl.int64)
            tl.store(states_ptr + save * state_stride + places, state, whole & (save != 0))
    tl.store(state_ptr, state, whole & (slot != 0))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def _convolve(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, slots_ptr, indptr_ptr, starts_ptr,
    token_rows_ptr, x_stride, state_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """A token to a program; what comes before its row's first token is in the state. Where that is
    its only one, the inputs in the state move up by a place."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    row, start = token, token
    if not ONE_TOKEN:
        row = tl.load(token_rows_ptr + token).to(tl.int64)
        start = tl.load(starts_ptr + tl.load(indptr_ptr + row)).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    total = tl.zeros((TILE,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, inside, other=0.0).to(tl.float32)
    for i in tl.static_range(WIDTH):
        at = token - (WIDTH - 1 - i)
        state_at = at - start + WIDTH - 1
        old = tl.load(
            states_ptr + slot * state_stride + channel * (WIDTH - 1) + state_at,
            inside & (at < start), other=0.0,
        )  # fmt: skip
        new = tl.load(x_ptr + at * x_stride + channel, inside & (at >= start), other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + i, inside, other=0.0)
        value = old.to(tl.float32) + new.to(tl.float32)  # one of them is 0
        total += value * weight.to(tl.float32)
        if ONE_TOKEN and i > 0:
            kept_ptr = states_ptr + slot * state_stride + channel * (WIDTH - 1) + i - 1
            tl.store(kept_ptr, value.to(old.dtype), inside & (slot != 0))
    if SILU:
        total = total / (1 + tl.exp(-total))
    tl.store(out_ptr + token * CHANNELS + channel, total.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def _keep_inputs(
    x_ptr, states_ptr, slots_ptr, indptr_ptr, starts_ptr, ends_ptr, saves_ptr, x_stride,
    state_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A prompt's row to a program: the last WIDTH - 1 inputs become its state, and before that the
    snapshots, which may need the old state too."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, BLOCK)
    inside = (channel < CHANNELS)[:, None] & (place < WIDTH - 1)[None, :]
    slot = tl.load(slots_ptr + row).to(tl.int64)
    places = channel[:, None] * (WIDTH - 1) + place[None, :]
    own_ptr = states_ptr + slot * state_stride
    first, last = tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1)
    begin = tl.load(starts_ptr + first)
    for piece in range(first, last):
        at = tl.load(ends_ptr + piece) - (WIDTH - 1) + place
        is_new = (at >= begin)[None, :]
        old_place = channel[:, None] * (WIDTH - 1) + (at - begin + WIDTH - 1)[None, :]
        old = tl.load(own_ptr + old_place, inside & (at < begin)[None, :], other=0.0)
        x_place = at.to(tl.int64)[None, :] * x_stride + channel[:, None]
        new = tl.load(x_ptr + x_place, inside & is_new, other=0.0)
        kept = tl.where(is_new, new.to(old.dtype), old)
        save = tl.load(saves_ptr + piece).to(tl.int64)
        tl.store(states_ptr + save * state_stride + places, kept, inside & (save != 0))
        is_last = (piece == last - 1) & (slot != 0)
        tl.store(own_ptr + places, kept, inside & is_last)


def recur(inputs: Recurrence, states: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
    """Move the states [rows of memory, *state_shape] of these rows on by their tokens, which write
    their outputs to `out`, as `Recur` has them. Each row is in a slot of its own, but for the
    padding slot, whose state stays."""
    if not len(rows.slots):
        return
    match inputs:
        case Convolution():
            _launch_convolution(inputs, states, rows, out)
        case SelectiveScan():
            _launch_scan(inputs, states, rows, out)
        case DeltaRule():
            _launch_delta_rule(inputs, states, rows, out)


def _launch_scan(
    inputs: SelectiveScan, states: torch.Tensor, rows: Rows, out: torch.Tensor
) -> None:
    x, dt, b, c = (_rows(each) for each in (inputs.x, inputs.dt, inputs.b, inputs.c))
    _, num_heads, head_dim = x.shape
    num_groups, n = b.shape[1:]
    channels = num_heads * head_dim
    of_group = channels // num_groups
    tile = min(SCAN_CHANNELS, of_group & -of_group)  # the largest power of two that divides it
    _scan[(len(rows.slots), channels // tile)](
        x, dt, inputs.a.contiguous(), b, c, inputs.d, out, states, *rows[:5],
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0),
        HEAD_DIM=head_dim, GROUP_CHANNELS=of_group, CHANNELS=channels, N=n,
        BLOCK_N=triton.next_power_of_2(n), TILE=tile, HAS_D=inputs.d is not None,
        A_OF_ENTRIES=inputs.a.dim() == 2, ONE_TOKEN=rows.indptr is None, num_warps=NUM_WARPS,
    )  # fmt: skip


def _launch_delta_rule(
    inputs: DeltaRule, states: torch.Tensor, rows: Rows, out: torch.Tensor
) -> None:
    q, k, v, g, beta = (_rows(each) for each in inputs)
    _, num_heads, dv = v.shape
    tile = min(DELTA_COLUMNS, triton.next_power_of_2(dv))
    _delta_rule[(len(rows.slots), num_heads, triton.cdiv(dv, tile))](
        q, k, v, g, beta, out, states, *rows[:5],
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), states.stride(0),
        HEADS=num_heads, KEY_HEADS=k.shape[1], DK=k.shape[2], DV=dv,
        BLOCK_K=triton.next_power_of_2(k.shape[2]), TILE=tile, G_OF_ROWS=g.dim() == 3,
        ONE_TOKEN=rows.indptr is None, num_warps=NUM_WARPS,
    )  # fmt: skip


def _launch_convolution(
    inputs: Convolution, states: torch.Tensor, rows: Rows, out: torch.Tensor
) -> None:
    x, weight = _rows(inputs.x), inputs.weight.contiguous()
    channels, width = weight.shape
    num_tokens = len(rows.slots) if rows.token_rows is None else len(rows.token_rows)
    tiles = triton.cdiv(channels, CONV_CHANNELS)
    _convolve[(num_tokens, tiles)](
        x, weight, inputs.bias, out, states, rows.slots, rows.indptr, rows.starts,
        rows.token_rows, x.stride(0), states.stride(0),
        CHANNELS=channels, WIDTH=width, TILE=CONV_CHANNELS, HAS_BIAS=inputs.bias is not None,
        SILU=inputs.silu, ONE_TOKEN=rows.indptr is None, num_warps=NUM_WARPS,
    )  # fmt: skip
    if rows.indptr is None:
        return
    _keep_inputs[(len(rows.slots), tiles)](
        x, states, *rows[:5], x.stride(0), states.stride(0),
        CHANNELS=channels, WIDTH=width, BLOCK=triton.next_power_of_2(width - 1),
        TILE=CONV_CHANNELS, num_warps=NUM_WARPS,
    )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Contiguous but for its first dimension."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x
