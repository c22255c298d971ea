"""A mixed step's decodes read their slots: their tokens, and their rows of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.attention.base import DecodeRows
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.worker.device_state import DeviceState

# (state, slots int32 [rows], tokens of at least as many, block_size) -> the rows. Fills the first
# tokens, and counts them. A padding row (slot 0) leaves its token alone; its position is -1.
# Only enqueues, and may be captured.
FillDecodes = Callable[[DeviceState, torch.Tensor, TokenBuffers, int], DecodeRows]


def fill_decodes_torch(
    state: DeviceState, slots: torch.Tensor, tokens: TokenBuffers, block_size: int
) -> DecodeRows:
    """The reference `FillDecodes`."""
    state.count_inputs(slots)
    first, is_valid = tokens.first(len(slots)), slots > 0
    rows = DecodeRows(state.block_tables[slots], state.positions[slots])
    for buffer, values in (
        (first.token_ids, state.last_tokens[slots]),
        (first.positions, rows.positions),
        (first.prompt_lens, state.prompt_lens[slots]),
        (first.write_slots, rows.write_slots(block_size)),
    ):
        buffer.copy_(torch.where(is_valid, values, buffer))
    return DecodeRows(rows.block_tables, torch.where(is_valid, rows.positions, -1))
