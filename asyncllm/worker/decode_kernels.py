"""`DecodeEnds` in Triton: one kernel before the forward pass, the sampler's two after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.worker.decode_ends import SlotRows
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.sampling_kernels import sample_and_advance

TABLE_BLOCK = 1024


@triton.jit
def _gather_slots(
    slots_ptr, last_tokens_ptr, positions_ptr, tables_ptr, temperatures_ptr, seeds_ptr,
    row_tokens_ptr, row_positions_ptr, row_tables_ptr, row_temperatures_ptr, row_seeds_ptr,
    num_pages, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if tl.program_id(1) == 0:
        tl.store(row_tokens_ptr + row, tl.load(last_tokens_ptr + slot))
        tl.store(row_positions_ptr + row, tl.load(positions_ptr + slot))
        tl.store(row_temperatures_ptr + row, tl.load(temperatures_ptr + slot))
        tl.store(row_seeds_ptr + row, tl.load(seeds_ptr + slot))
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = page < num_pages
    pages = tl.load(tables_ptr + slot.to(tl.int64) * num_pages + page, inside, other=0)
    tl.store(row_tables_ptr + row.to(tl.int64) * num_pages + page, pages, inside)


class TritonDecodeEnds:
    def begin(self, state: DeviceState, slots: torch.Tensor) -> SlotRows:
        num_rows, num_pages = len(slots), state.block_tables.shape[1]
        rows = SlotRows(
            last_tokens=torch.empty_like(slots),
            positions=torch.empty_like(slots),
            block_tables=slots.new_empty((num_rows, num_pages)),
            temperatures=torch.empty_like(slots, dtype=torch.float32),
            seeds=torch.empty_like(slots, dtype=torch.int64),
        )
        _gather_slots[(num_rows, triton.cdiv(num_pages, TABLE_BLOCK))](
            slots, state.last_tokens, state.positions, state.block_tables, state.temperatures,
            state.seeds, rows.last_tokens, rows.positions, rows.block_tables, rows.temperatures,
            rows.seeds, num_pages, BLOCK=TABLE_BLOCK,
        )  # fmt: skip
        return rows

    def finish(
        self, state: DeviceState, slots: torch.Tensor, rows: SlotRows, logits: torch.Tensor
    ) -> torch.Tensor:
        return sample_and_advance(logits, rows, slots, state)
