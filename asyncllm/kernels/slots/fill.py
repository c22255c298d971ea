"""The CUDA kernel of `FillDecodes`: all rows at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.attention.base import DecodeRows
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.penalty_kernels import count_input
from asyncllm.worker.slot_rows_kernel import TABLE_BLOCK

# Of which a program reads or writes one number: whether they are aligned makes no other variant.
SCALARS = [
    "slots_ptr", "last_tokens_ptr", "positions_ptr", "prompt_lens_ptr", "token_ids_ptr",
    "token_positions_ptr", "token_prompt_lens_ptr", "write_slots_ptr", "row_positions_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _fill_decodes(
    slots_ptr, last_tokens_ptr, positions_ptr, prompt_lens_ptr, tables_ptr,
    token_ids_ptr, token_positions_ptr, token_prompt_lens_ptr, write_slots_ptr,
    row_positions_ptr, row_tables_ptr,
    num_pages, vocab_size, penalties, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    is_one = slot > 0
    table_ptr = tables_ptr + slot.to(tl.int64) * num_pages
    if tl.program_id(1) == 0:
        position = tl.load(positions_ptr + slot)
        page = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
        token = tl.load(last_tokens_ptr + slot)
        count_input(slot, token, vocab_size, penalties)
        tl.store(token_ids_ptr + row, token, is_one)
        tl.store(token_positions_ptr + row, position, is_one)
        tl.store(token_prompt_lens_ptr + row, tl.load(prompt_lens_ptr + slot), is_one)
        tl.store(write_slots_ptr + row, page * BLOCK_SIZE + position % BLOCK_SIZE, is_one)
        tl.store(row_positions_ptr + row, tl.where(is_one, position, -1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < num_pages) & is_one
    pages = tl.load(table_ptr + column, inside, other=0)
    tl.store(row_tables_ptr + row.to(tl.int64) * num_pages + column, pages, inside)


def fill_decodes_triton(
    state: DeviceState, slots: torch.Tensor, tokens: TokenBuffers, block_size: int
) -> DecodeRows:
    """`FillDecodes` in one kernel. Tables of rows that are none's are not filled."""
    num_rows, num_pages = len(slots), state.block_tables.shape[1]
    positions, tables = torch.empty_like(slots), slots.new_empty((num_rows, num_pages))
    _fill_decodes[(num_rows, triton.cdiv(num_pages, TABLE_BLOCK))](
        slots, state.last_tokens, state.positions, state.prompt_lens, state.block_tables,
        tokens.token_ids, tokens.positions, tokens.prompt_lens, tokens.write_slots,
        positions, tables, num_pages, state.output_counts.shape[1], state.penalties,
        BLOCK_SIZE=block_size, BLOCK=TABLE_BLOCK,
    )  # fmt: skip
    return DecodeRows(tables, positions)
