"""CUDA kernels of the sampler: the same functions as their torch references in sampler.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.attention.flashinfer_import import flashinfer
from asyncllm.attention.programmatic_launch import (
    has_programmatic_launch,
    start_next,
    wait_previous,
)
from asyncllm.types import NON_FINITE_TOKEN
from asyncllm.worker.decode_ends import SlotRows
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.token_masks import LEAST_LOGIT, RowMasks

BLOCK = (
    4096  # logits per program: a row of 128k is 32 programs, enough for one row to fill the card
)


@triton.jit
def _mix(h):
    """MurmurHash3's 32-bit finaliser, as `sampler._mix`."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _best_of_block(
    logits_ptr, slots_ptr, temperatures_ptr, seeds_ptr, positions_ptr, of_row_ptr, bits_ptr,
    values_ptr, tokens_ptr, vocab_size, row_stride, bits_stride, num_blocks,
    AHEAD: tl.constexpr, BY_SLOT: tl.constexpr, SLOT_POSITIONS: tl.constexpr,
    MASKED: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best noisy logit of one block of one row, AHEAD positions past the given.

    BY_SLOT: temperatures and seeds are the slots', not the rows'; SLOT_POSITIONS: positions too.
    """
    if PDL:
        start_next()
        after = wait_previous()
        logits_ptr += after
        temperatures_ptr += after
        seeds_ptr += after
        positions_ptr += after
        values_ptr += after
        tokens_ptr += after
        if BY_SLOT:
            slots_ptr += after
        if MASKED:
            of_row_ptr += after
            bits_ptr += after
    row = tl.program_id(0)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + token, mask, other=float("-inf"))
    x = x.to(tl.float32)
    if MASKED:
        place = tl.load(of_row_ptr + row)
        if place >= 0:
            words_ptr = bits_ptr + place.to(tl.int64) * bits_stride + token // 32
            allowed = ((tl.load(words_ptr, mask, other=0) >> (token % 32)) & 1) != 0
            least = tl.where(x < LEAST, LEAST, x)
            is_bad = (x != x) | (x == float("inf"))  # must win, to be seen
            x = tl.where(is_bad, float("inf"), tl.where(allowed, least, float("-inf")))
    param = tl.load(slots_ptr + row) if BY_SLOT else row
    temperature = tl.load(temperatures_ptr + param)
    if temperature > 0:
        seed = tl.load(seeds_ptr + param)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        position = tl.load(positions_ptr + (param if SLOT_POSITIONS else row)) + AHEAD
        key = _mix(low ^ _mix(high ^ _mix(position.to(tl.uint32))))
        bits = _mix(_mix(token.to(tl.uint32) + key) ^ _mix(key ^ 0x9E3779B9))
        u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
        exponential = tl.where(u < 1e-3, u + 0.5 * u * u, -tl.log(1.0 - u))
        x = x / temperature - tl.log(exponential)
        x = tl.where(mask, x, float("-inf"))
    x = tl.where(x != x, float("inf"), x)  # a NaN must win, to be seen
    best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values_ptr + row * num_blocks + block, best)
    tl.store(tokens_ptr + row * num_blocks + block, block * BLOCK + index)


@triton.jit
def _best_of_row(
    values_ptr, tokens_ptr, out_ptr, slots_ptr, positions_ptr, last_tokens_ptr, slot_positions_ptr,
    num_blocks, BLOCKS: tl.constexpr, NON_FINITE: tl.constexpr, ADVANCE: tl.constexpr,
    AHEAD: tl.constexpr, SLOT_POSITIONS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of a row's blocks; the first among equals, as argmax. ADVANCE: its slot too.

    NON_FINITE where the best is infinite."""
    if PDL:
        start_next()
        after = wait_previous()
        values_ptr += after
        tokens_ptr += after
        out_ptr += after
        if ADVANCE:
            last_tokens_ptr += after
            slot_positions_ptr += after
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    mask = block < num_blocks
    values = tl.load(values_ptr + row * num_blocks + block, mask, other=float("-inf"))
    best, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(tokens_ptr + row * num_blocks + index)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, token, NON_FINITE))
    if ADVANCE:
        slot = tl.load(slots_ptr + row)
        tl.store(last_tokens_ptr + slot, token)
        if not SLOT_POSITIONS:
            position = tl.load(positions_ptr + row) + AHEAD
            tl.store(slot_positions_ptr + slot, tl.where(slot == 0, 0, position))  # 0 is padding


def plain_sample_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """`PlainSample` without a sort: int32 [rows] from logits [rows, V]."""
    return _sample(logits, temperatures, seeds, positions)


def sample_and_advance(
    logits: torch.Tensor, rows: SlotRows, slots: torch.Tensor, state: DeviceState
) -> torch.Tensor:
    """`plain_sample_triton` for the positions after the rows', and the slots move on to them."""
    return _sample(logits, rows.temperatures, rows.seeds, rows.positions, slots, state, ahead=1)


def sample_slots_triton(
    state: DeviceState,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    masks: RowMasks | None,
) -> torch.Tensor:
    """`SampleSlots` in two kernels, the masks applied where the logits are read."""
    return _sample(
        logits, state.temperatures, state.seeds, positions, slots, state, masks, by_slot=True
    )


def _sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    state: DeviceState | None = None,
    masks: RowMasks | None = None,
    *,
    ahead: int = 0,
    by_slot: bool = False,
) -> torch.Tensor:
    """`state`: whose slots move on. `by_slot`: parameters are of slots, as without `positions`."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    device = logits.device
    values = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    out = torch.empty(num_rows, dtype=torch.int32, device=device)
    flags = {"PDL": True, "launch_pdl": True} if has_programmatic_launch(device) else {"PDL": False}
    flags["SLOT_POSITIONS"] = positions is None
    if positions is None:
        assert state is not None
        positions = state.positions
    _best_of_block[(num_rows, num_blocks)](
        logits, slots, temperatures, seeds, positions,
        masks.of_row if masks is not None else None, masks.bits if masks is not None else None,
        values, tokens, vocab_size, logits.stride(0),
        masks.bits.stride(0) if masks is not None else 0, num_blocks,
        AHEAD=ahead, BY_SLOT=by_slot, MASKED=masks is not None, LEAST=LEAST_LOGIT, BLOCK=BLOCK,
        **flags,
    )  # fmt: skip
    _best_of_row[(num_rows,)](
        values, tokens, out, slots, positions,
        state.last_tokens if state is not None else None,
        state.positions if state is not None else None,
        num_blocks, BLOCKS=triton.next_power_of_2(num_blocks), NON_FINITE=NON_FINITE_TOKEN,
        ADVANCE=state is not None, AHEAD=ahead, **flags,
    )  # fmt: skip
    return out


def top_k_top_p_flashinfer(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """`TopKTopP` by FlashInfer's radix kernels, without a sort. f32 [rows, V]."""
    vocab_size = logits.shape[1]
    limits = torch.where(top_ks > 0, top_ks.clamp(max=vocab_size), vocab_size)
    masked = flashinfer.sampling.top_k_mask_logits(logits, limits)
    logits = torch.where((top_ks > 0).unsqueeze(1), masked, logits)
    probs = flashinfer.sampling.top_p_renorm_probs(
        logits.softmax(dim=1), top_ps, is_deterministic=True
    )
    keep = (probs > 0) | (top_ps >= 1).unsqueeze(1)
    return logits.masked_fill(~keep, float("-inf"))
