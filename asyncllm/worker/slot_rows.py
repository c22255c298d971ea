"""A decode step gathers the state of its slots, so that rows of the batch are rows of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.kernels.records import SlotRows as SlotRows
from asyncllm.worker.device_state import DeviceState

# (state, slots int32 [rows]); only enqueues, and may be captured. Counts the inputs.
GatherSlots = Callable[[DeviceState, torch.Tensor], SlotRows]


def gather_slots_torch(state: DeviceState, slots: torch.Tensor) -> SlotRows:
    """The reference `GatherSlots`."""
    state.count_inputs(slots)
    positions = state.positions[slots]
    return SlotRows(state.last_tokens[slots], positions, positions + 1, state.block_tables[slots])
