"""A decode step gathers the state of its slots, so that rows of the batch are rows of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncllm.worker.device_state import DeviceState


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The state of a step's slots, one row each, as the step found it."""

    last_tokens: torch.Tensor  # int32 [rows]
    positions: torch.Tensor  # int32 [rows]
    next_positions: torch.Tensor  # int32 [rows], of the tokens to be sampled
    block_tables: torch.Tensor  # int32 [rows, pages per sequence]


# (state, slots int32 [rows]); only enqueues, and may be captured. Counts the inputs.
GatherSlots = Callable[[DeviceState, torch.Tensor], SlotRows]


def gather_slots_torch(state: DeviceState, slots: torch.Tensor) -> SlotRows:
    """The reference `GatherSlots`."""
    state.count_inputs(slots)
    positions = state.positions[slots]
    return SlotRows(state.last_tokens[slots], positions, positions + 1, state.block_tables[slots])
