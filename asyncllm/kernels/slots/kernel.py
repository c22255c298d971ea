"""Slots' rows for a decode step and for a mixed step's decodes, and slots' changes, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Protocol

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import Start
from asyncllm.kernels.records import DecodeRows, SlotState
from asyncllm.kernels.sampling.logits import count_input

TABLE_BLOCK = 1024
CHANGES_BLOCK = 128
# A slot's record in words (worker/slot_changes.py): its seed's two, six integers, floats.
FIRST_INT, FIRST_FLOAT = 2, 8
FEW_PAGES = 16  # as aligned as those of usual context windows
# Of which a program reads or writes one number: whether they are aligned makes no other variant.
GATHERED_SCALARS = [
    "slots_ptr", "last_tokens_ptr", "positions_ptr", "row_tokens_ptr", "row_positions_ptr",
    "next_positions_ptr",
]  # fmt: skip
FILLED_SCALARS = [
    "slots_ptr", "last_tokens_ptr", "positions_ptr", "token_ids_ptr",
    "token_positions_ptr", "token_slots_ptr", "write_slots_ptr", "row_positions_ptr",
]  # fmt: skip


class TokenRows(Protocol):
    """A mixed step's tokens, as graphs/token_buffers.py has them."""

    @property
    def token_ids(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def write_slots(self) -> torch.Tensor: ...


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=GATHERED_SCALARS)
def _gather_slots(
    slots_ptr, last_tokens_ptr, positions_ptr, tables_ptr,
    row_tokens_ptr, row_positions_ptr, next_positions_ptr, row_tables_ptr,
    num_slots, num_pages, vocab_size, penalties, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    if (tl.program_id(1) == 0) & (group == 0):
        position = tl.load(positions_ptr + slot)
        token = tl.load(last_tokens_ptr + slot)
        count_input(slot, token, vocab_size, penalties)
        tl.store(row_tokens_ptr + row, token)
        tl.store(row_positions_ptr + row, position)
        tl.store(next_positions_ptr + row, position + 1)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = page < num_pages
    table = group.to(tl.int64) * num_slots + slot
    pages = tl.load(tables_ptr + table * num_pages + page, inside, other=0)
    row_table = group.to(tl.int64) * tl.num_programs(0) + row
    tl.store(row_tables_ptr + row_table * num_pages + page, pages, inside)


def gather_slots_triton(
    state: SlotState, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, DecodeRows]:
    """`GatherSlots` in one kernel."""
    num_groups, num_slots, num_pages = state.block_tables.shape
    tables = slots.new_empty((num_groups, len(slots), num_pages))
    last_tokens, positions, next_positions = (torch.empty_like(slots) for _ in range(3))
    _gather_slots[(len(slots), triton.cdiv(num_pages, TABLE_BLOCK), num_groups)](
        slots, state.last_tokens, state.positions, state.block_tables, last_tokens, positions,
        next_positions, tables, num_slots, num_pages, state.output_counts.shape[1],
        state.penalties, BLOCK=TABLE_BLOCK,
    )  # fmt: skip
    return last_tokens, next_positions, DecodeRows(tables.unbind(), positions)


@triton.jit(
    do_not_specialize=["num_slots", "write_slots_stride"],
    do_not_specialize_on_alignment=FILLED_SCALARS,
)
def _fill_decodes(
    slots_ptr, last_tokens_ptr, positions_ptr, tables_ptr,
    token_ids_ptr, token_positions_ptr, token_slots_ptr, write_slots_ptr,
    row_positions_ptr, row_tables_ptr, write_slots_stride,
    num_slots, num_pages, vocab_size, penalties, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    is_valid = slot > 0
    table_ptr = tables_ptr + (group.to(tl.int64) * num_slots + slot) * num_pages
    if tl.program_id(1) == 0:
        position = tl.load(positions_ptr + slot)
        page = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
        place_ptr = write_slots_ptr + group * write_slots_stride + row
        tl.store(place_ptr, page * BLOCK_SIZE + position % BLOCK_SIZE, is_valid)
    if (tl.program_id(1) == 0) & (group == 0):
        position = tl.load(positions_ptr + slot)
        token = tl.load(last_tokens_ptr + slot)
        count_input(slot, token, vocab_size, penalties)
        tl.store(token_ids_ptr + row, token, is_valid)
        tl.store(token_positions_ptr + row, position, is_valid)
        tl.store(token_slots_ptr + row, slot, is_valid)
        tl.store(row_positions_ptr + row, tl.where(is_valid, position, -1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < num_pages) & is_valid
    pages = tl.load(table_ptr + column, inside, other=0)
    row_table = group.to(tl.int64) * tl.num_programs(0) + row
    tl.store(row_tables_ptr + row_table * num_pages + column, pages, inside)


def fill_decodes_triton(
    state: SlotState, slots: torch.Tensor, tokens: TokenRows, block_size: int
) -> DecodeRows:
    """`FillDecodes` in one kernel. Tables of padding rows are not filled."""
    num_groups, num_slots, num_pages = state.block_tables.shape
    positions = torch.empty_like(slots)
    tables = slots.new_empty((num_groups, len(slots), num_pages))
    _fill_decodes[(len(slots), triton.cdiv(num_pages, TABLE_BLOCK), num_groups)](
        slots, state.last_tokens, state.positions, state.block_tables,
        tokens.token_ids, tokens.positions, tokens.slots, tokens.write_slots,
        positions, tables, tokens.write_slots.stride(0), num_slots, num_pages,
        state.output_counts.shape[1], state.penalties,
        BLOCK_SIZE=block_size, BLOCK=TABLE_BLOCK,
    )  # fmt: skip
    return DecodeRows(tables.unbind(), positions)


@triton.jit(
    do_not_specialize=["num_records", "num_entries", "num_slots", "num_pages"],
    do_not_specialize_on_alignment=["records_ptr", "entries_ptr"],
)
def _write_slots(
    records_ptr, entries_ptr, last_tokens_ptr, positions_ptr, prompt_lens_ptr, top_ks_ptr,
    adapters_ptr, seeds_ptr, floats_ptr, tables_ptr, num_records, num_entries, num_slots, num_pages,
    WORDS: tl.constexpr, FIRST_INT: tl.constexpr, FIRST_FLOAT: tl.constexpr,
    NUM_FLOATS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        inside = place < num_entries
        row = tl.load(entries_ptr + place, inside, other=0).to(tl.int64)
        index = tl.load(entries_ptr + num_entries + place, inside, other=0)
        page = tl.load(entries_ptr + 2 * num_entries + place, inside, other=0)
        tl.store(tables_ptr + row * num_pages + index, page, inside)
    else:
        inside = place < num_records
        record_ptr = records_ptr + place * WORDS
        low = tl.load(record_ptr, inside, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(record_ptr + 1, inside, other=0)
        ints_ptr = record_ptr + FIRST_INT
        slot = tl.load(ints_ptr, inside, other=0)
        tl.store(last_tokens_ptr + slot, tl.load(ints_ptr + 1, inside, other=0), inside)
        tl.store(positions_ptr + slot, tl.load(ints_ptr + 2, inside, other=0), inside)
        tl.store(prompt_lens_ptr + slot, tl.load(ints_ptr + 3, inside, other=0), inside)
        tl.store(top_ks_ptr + slot, tl.load(ints_ptr + 4, inside, other=0), inside)
        tl.store(adapters_ptr + slot, tl.load(ints_ptr + 5, inside, other=0), inside)
        tl.store(seeds_ptr + slot, (high.to(tl.int64) << 32) | low.to(tl.int64), inside)
        for i in tl.static_range(NUM_FLOATS):
            bits = tl.load(record_ptr + FIRST_FLOAT + i, inside, other=0)
            value = bits.to(tl.float32, bitcast=True)
            tl.store(floats_ptr + i * num_slots + slot, value, inside)


def record_words(state: SlotState) -> int:
    """An even number: every record's seed is aligned."""
    num_words = FIRST_FLOAT + len(state.float_params)
    return num_words + num_words % 2


def write_slots_triton(state: SlotState, records: torch.Tensor, entries: torch.Tensor) -> None:
    """`WriteSlots` in one kernel."""
    words, num_records, num_entries = record_words(state), len(records), entries.shape[1]
    assert records.shape[1] == words
    _write_slots[(triton.cdiv(max(num_records, num_entries), CHANGES_BLOCK), 2)](
        records, entries, state.last_tokens, state.positions, state.prompt_lens, state.top_ks,
        state.adapters, state.seeds, state.float_params, state.block_tables, num_records,
        num_entries, state.float_params.shape[1], state.block_tables.shape[-1], WORDS=words,
        FIRST_INT=FIRST_INT, FIRST_FLOAT=FIRST_FLOAT, NUM_FLOATS=len(state.float_params),
        BLOCK=CHANGES_BLOCK,
    )  # fmt: skip


def prewarm(start: Start) -> Iterator[Callable[[], object]]:
    """One slot, read and written."""

    def state() -> SlotState:
        return start.new_state(FEW_PAGES, 1)

    def fill() -> None:
        row = start.zeros(1)
        tokens = SimpleNamespace(
            token_ids=row, positions=row, slots=row, write_slots=row.long()[None]
        )
        fill_decodes_triton(state(), row, tokens, start.block_size)

    def write() -> None:
        records = start.zeros(1, record_words(state()))
        write_slots_triton(state(), records, start.zeros(3, 1))

    yield lambda: gather_slots_triton(state(), start.zeros(1))
    yield fill
    yield write
