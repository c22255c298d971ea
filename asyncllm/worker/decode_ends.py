"""What a decode step does before its forward pass and after its logits.

Before: read the state of the step's slots, so that rows of the batch are rows of tensors. After:
sample by the plain way, and leave each slot's state at its new token. Here in plain torch, and
`decode_kernels.py` the same in three kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.sampler import plain_sample_torch


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The state of a step's slots, one row each, as the step found it."""

    last_tokens: torch.Tensor  # int32 [rows]
    positions: torch.Tensor  # int32 [rows]
    block_tables: torch.Tensor  # int32 [rows, pages per sequence]
    temperatures: torch.Tensor  # float32 [rows]
    seeds: torch.Tensor  # int64 [rows]


class DecodeEnds(Protocol):
    """Both only enqueue, and may be captured. slots: int32 [rows]."""

    def begin(self, state: DeviceState, slots: torch.Tensor) -> SlotRows: ...

    def finish(
        self, state: DeviceState, slots: torch.Tensor, rows: SlotRows, logits: torch.Tensor
    ) -> torch.Tensor:
        """Sampled tokens int32 [rows] from logits [rows, V]; the slots have moved on to them."""
        ...


class TorchDecodeEnds:
    def begin(self, state: DeviceState, slots: torch.Tensor) -> SlotRows:
        return SlotRows(
            state.last_tokens[slots],
            state.positions[slots],
            state.block_tables[slots],
            state.temperatures[slots],
            state.seeds[slots],
        )

    def finish(
        self, state: DeviceState, slots: torch.Tensor, rows: SlotRows, logits: torch.Tensor
    ) -> torch.Tensor:
        positions = rows.positions + 1
        tokens = plain_sample_torch(logits, rows.temperatures, rows.seeds, positions)
        state.advance(slots, tokens, positions)
        return tokens
