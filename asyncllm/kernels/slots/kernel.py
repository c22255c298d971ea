"""The CUDA kernel of `GatherSlots`: all of a step's rows at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.penalty_kernels import count_input
from asyncllm.worker.slot_rows import SlotRows

TABLE_BLOCK = 1024
# Of which a program reads or writes one number: whether they are aligned makes no other variant.
SCALARS = [
    "slots_ptr", "last_tokens_ptr", "positions_ptr", "row_tokens_ptr", "row_positions_ptr",
    "next_positions_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _gather_slots(
    slots_ptr, last_tokens_ptr, positions_ptr, tables_ptr,
    row_tokens_ptr, row_positions_ptr, next_positions_ptr, row_tables_ptr,
    num_pages, vocab_size, penalties, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if tl.program_id(1) == 0:
        position = tl.load(positions_ptr + slot)
        token = tl.load(last_tokens_ptr + slot)
        count_input(slot, token, vocab_size, penalties)
        tl.store(row_tokens_ptr + row, token)
        tl.store(row_positions_ptr + row, position)
        tl.store(next_positions_ptr + row, position + 1)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = page < num_pages
    pages = tl.load(tables_ptr + slot.to(tl.int64) * num_pages + page, inside, other=0)
    tl.store(row_tables_ptr + row.to(tl.int64) * num_pages + page, pages, inside)


def gather_slots_triton(state: DeviceState, slots: torch.Tensor) -> SlotRows:
    """`GatherSlots` in one kernel."""
    num_rows, num_pages = len(slots), state.block_tables.shape[1]
    rows = SlotRows(
        last_tokens=torch.empty_like(slots),
        positions=torch.empty_like(slots),
        next_positions=torch.empty_like(slots),
        block_tables=slots.new_empty((num_rows, num_pages)),
    )
    _gather_slots[(num_rows, triton.cdiv(num_pages, TABLE_BLOCK))](
        slots, state.last_tokens, state.positions, state.block_tables, rows.last_tokens,
        rows.positions, rows.next_positions, rows.block_tables, num_pages,
        state.output_counts.shape[1], state.penalties, BLOCK=TABLE_BLOCK,
    )  # fmt: skip
    return rows
