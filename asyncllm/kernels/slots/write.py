"""The CUDA kernel of `WriteSlots`: all changes at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.worker.device_state import FLOAT_PARAMS, DeviceState
from asyncllm.worker.slot_changes import FIRST_FLOAT, FIRST_INT, RECORD_WORDS

BLOCK = 128


@triton.jit(
    do_not_specialize=["num_records", "num_entries", "num_slots", "num_pages"],
    do_not_specialize_on_alignment=["records_ptr", "entries_ptr"],
)
def _write_slots(
    records_ptr, entries_ptr, last_tokens_ptr, positions_ptr, prompt_lens_ptr, top_ks_ptr,
    seeds_ptr, floats_ptr, tables_ptr, num_records, num_entries, num_slots, num_pages,
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
        tl.store(seeds_ptr + slot, (high.to(tl.int64) << 32) | low.to(tl.int64), inside)
        for i in tl.static_range(NUM_FLOATS):
            bits = tl.load(record_ptr + FIRST_FLOAT + i, inside, other=0)
            value = bits.to(tl.float32, bitcast=True)
            tl.store(floats_ptr + i * num_slots + slot, value, inside)


def write_slots_triton(
    state: DeviceState, records: torch.Tensor | None, entries: torch.Tensor | None
) -> None:
    """`WriteSlots` in one kernel."""
    num_records = 0 if records is None else len(records)
    num_entries = 0 if entries is None else entries.shape[1]
    num_blocks = triton.cdiv(max(num_records, num_entries), BLOCK)
    _write_slots[(num_blocks, 1 if records is None else 2)](
        state.positions if records is None else records,
        state.positions if entries is None else entries,
        state.last_tokens, state.positions, state.prompt_lens, state.top_ks, state.seeds,
        state.float_params, state.block_tables, num_records, num_entries,
        state.float_params.shape[1], state.block_tables.shape[1], WORDS=RECORD_WORDS,
        FIRST_INT=FIRST_INT, FIRST_FLOAT=FIRST_FLOAT, NUM_FLOATS=len(FLOAT_PARAMS), BLOCK=BLOCK,
    )  # fmt: skip
