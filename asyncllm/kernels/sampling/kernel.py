"""CUDA kernels of the sampler: the same function as its torch reference in sampler.py.

Two kernels, whatever the rows ask: many programs look at a row's logits side by side, then one
picks its token. Of a row that may not draw every token the first only summarises, see
filters.py; of the others it draws, and the second takes the best of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import Start
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import RowMasks, SlotState
from asyncllm.kernels.sampling.filters import (
    GROUP,
    draw_filtered,
    largest_of,
    may_filter,
    summarise_block,
)
from asyncllm.kernels.sampling.logits import gumbel_noise, load_logits, open_penalties
from asyncllm.types import NON_FINITE_TOKEN

BLOCK = 4096  # logits per program: 32 of them for a row of 128k, so that one row fills the GPU
PICK_WARPS = 8  # a program picks for a row, and reads some thousand logits where that filters
# Arguments that are a scalar, or of which a program reads one: what values and addresses are
# multiples of is no reason for another variant, which the compiler takes a second for.
SCALARS = ["num_blocks", "bits_stride", "by_slot"]
POINTERS_TO_SCALARS = [
    "slots_ptr", "positions_ptr", "of_row_ptr", "bits_ptr", "temperatures_ptr", "top_ks_ptr",
    "top_ps_ptr", "min_ps_ptr", "seeds_ptr", "out_ptr", "last_tokens_ptr", "slot_positions_ptr",
]  # fmt: skip
LEAST_BLOCKS = 64  # of one row that the second kernel is compiled for: of up to 262,144 tokens
# By how much the keys (filters.py) of neighbouring logits differ.
UNITS = {torch.bfloat16: 1 << 16, torch.float16: 1 << 13, torch.float32: 1}


@triton.jit
def _open_row(
    row, slot, logits_ptr, row_stride, vocab_size, of_row_ptr, bits_ptr, bits_stride, penalties,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A row's logits, mask and penalties as `load_logits` takes them."""
    place = tl.load(of_row_ptr + row) if MASKED else row
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    words_ptr = bits_ptr + place.to(tl.int64) * bits_stride
    of_slot = open_penalties(slot, vocab_size, penalties)
    return row_ptr, vocab_size, MASKED, place >= 0, words_ptr, of_slot


@triton.jit
def _first_of_best(x):
    """(value, index), as argmax."""
    return tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def _load_parameters(slot, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr):
    """A slot's temperature, top_k, top_p and min_p."""
    temperature = tl.load(temperatures_ptr + slot)
    top_k = tl.load(top_ks_ptr + slot)
    top_p = tl.load(top_ps_ptr + slot)
    return temperature, top_k, top_p, tl.load(min_ps_ptr + slot)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=POINTERS_TO_SCALARS)
def _look_at_block(
    logits_ptr, row_stride, vocab_size, slots_ptr, positions_ptr, of_row_ptr, bits_ptr, bits_stride,
    temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, penalties,
    values_ptr, tokens_ptr, maxima_ptr, num_blocks, by_slot,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best noisy logit of one block of one row, and its token; a summary where the row filters.

    by_slot: 1 where positions are of slots, not of rows.
    """
    row = tl.program_id(0)
    if PDL:
        start_next()
        row += wait_previous()  # every address depends on it
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    opened = _open_row(
        row, slot, logits_ptr, row_stride, vocab_size, of_row_ptr, bits_ptr, bits_stride, penalties,
        MASKED,
    )  # fmt: skip
    x = load_logits(opened, token)
    temperature, top_k, top_p, min_p = _load_parameters(
        slot, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr
    )
    out = row * num_blocks + block
    if may_filter(temperature, top_k, top_p, min_p, vocab_size):
        log_sum = summarise_block(x, temperature, maxima_ptr + out * (BLOCK // GROUP))
        tl.store(values_ptr + out, log_sum)
    else:
        if temperature > 0:
            seed = tl.load(seeds_ptr + slot)
            position = tl.load(positions_ptr + tl.where(by_slot != 0, slot, row))
            x = x / temperature + gumbel_noise(token, seed, position)
            x = tl.where(token < vocab_size, x, float("-inf"))
            x = tl.where(x != x, float("inf"), x)
        best, index = _first_of_best(x)
        tl.store(values_ptr + out, best)
        tl.store(tokens_ptr + out, block * BLOCK + index)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=POINTERS_TO_SCALARS)
def _pick_of_row(
    logits_ptr, row_stride, vocab_size, slots_ptr, positions_ptr, of_row_ptr, bits_ptr, bits_stride,
    temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, penalties,
    values_ptr, tokens_ptr, maxima_ptr, listed_ptr, out_ptr, last_tokens_ptr, slot_positions_ptr,
    num_blocks, by_slot, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, NON_FINITE: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's token, NON_FINITE where the best is infinite, and its slot moves on to it."""
    row = tl.program_id(0)
    if PDL:
        start_next()
        row += wait_previous()  # every address depends on it
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + tl.where(by_slot != 0, slot, row))
    temperature, top_k, top_p, min_p = _load_parameters(
        slot, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr
    )
    block = tl.arange(0, BLOCKS)
    in_row = block < num_blocks
    values = tl.load(values_ptr + row * num_blocks + block, in_row, other=float("-inf"))
    best = float("-inf")
    token = 0
    if may_filter(temperature, top_k, top_p, min_p, vocab_size):
        num_groups = num_blocks * (BLOCK // GROUP)
        maxima_ptr += row.to(tl.int64) * num_groups
        largest = largest_of(maxima_ptr, num_groups)
        if (largest > float("-inf")) & (largest < float("inf")):
            opened = _open_row(
                row, slot, logits_ptr, row_stride, vocab_size, of_row_ptr, bits_ptr, bits_stride,
                penalties, MASKED,
            )  # fmt: skip
            unit = tl.where(opened[5][0], 1, UNIT)  # penalised logits are float32's
            listed_ptr += row.to(tl.int64) * num_groups
            seed = tl.load(seeds_ptr + slot)
            best, token = draw_filtered(
                opened, maxima_ptr, listed_ptr, num_groups, values, largest,
                temperature, top_k, top_p, min_p, seed, position, unit,
            )  # fmt: skip
    else:
        best, index = _first_of_best(values)
        token = tl.load(tokens_ptr + row * num_blocks + index)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, token, NON_FINITE))
    _move_on(slot, token, position, last_tokens_ptr, slot_positions_ptr, by_slot)


@triton.jit
def _move_on(slot, token, position, last_tokens_ptr, slot_positions_ptr, by_slot):
    """The slot's last token is this one, of what is not finite any: it has an embedding."""
    tl.store(last_tokens_ptr + slot, token)
    next_position = tl.where(slot == 0, 0, position)  # 0 is padding
    tl.store(slot_positions_ptr + slot, next_position, by_slot == 0)


def sample_slots_triton(
    state: SlotState,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    masks: RowMasks | None,
) -> torch.Tensor:
    """`SampleSlots` in two kernels. Reads the logits once, and some of filtered rows again."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    device = logits.device
    values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    groups = (num_rows, num_blocks * (BLOCK // GROUP.value))
    maxima = torch.empty(groups, dtype=torch.float32, device=device)
    listed = torch.empty(groups, dtype=torch.int32, device=device)
    out = torch.empty(num_rows, dtype=torch.int32, device=device)
    of_row, bits = (slots, slots) if masks is None else (masks.of_row, masks.bits)
    rows = (
        logits, logits.stride(0), vocab_size, slots,
        state.positions if positions is None else positions,
        of_row, bits, bits.stride(0),
        state.temperatures, state.top_ks, state.top_ps, state.min_ps, state.seeds, state.penalties,
    )  # fmt: skip
    flags = {
        "BLOCK": BLOCK,
        "GROUP": GROUP.value,
        "MASKED": masks is not None,
        **launch_flags(device),
    }
    by_slot = int(positions is None)
    _look_at_block[(num_rows, num_blocks)](
        *rows, values, tokens, maxima, num_blocks, by_slot, **flags
    )
    _pick_of_row[(num_rows,)](
        *rows, values, tokens, maxima, listed, out, state.last_tokens, state.positions, num_blocks,
        by_slot, BLOCKS=max(LEAST_BLOCKS, triton.next_power_of_2(num_blocks)),
        UNIT=UNITS[logits.dtype], NON_FINITE=NON_FINITE_TOKEN, num_warps=PICK_WARPS, **flags,
    )  # fmt: skip
    return out


def prewarm(start: Start) -> Iterator[Callable[[], object]]:
    """One row, masked or not; in float32 where `sample_fully` has edited the logits."""
    dtypes = dict.fromkeys((start.dtype, torch.float32))
    yield from (
        partial(_sample_zeros, start, each, masked) for each in dtypes for masked in (False, True)
    )


def _sample_zeros(start: Start, dtype: torch.dtype, is_masked: bool) -> None:
    vocab_size, slots = start.sizes.vocab_size, start.zeros(1)
    logits, masks = start.zeros(1, vocab_size, dtype=dtype), None
    if is_masked:  # every token is allowed
        masks = RowMasks(start.zeros(1), start.zeros(1, -(-vocab_size // 32)) - 1)
    sample_slots_triton(start.new_state(1, vocab_size), logits, slots, slots, masks)
