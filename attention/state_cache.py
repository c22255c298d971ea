"""The states of recurrent layers: a row of memory per slot and per snapshot.

A state's size does not depend on the length of its sequence, so it is not paged: row i belongs to
slot i. Rows after the slots' are snapshots of prefixes, from which later requests can continue.

    rows       [slots + snapshots, bytes]   uint8
    host       [num_host_rows, bytes]       of swapped sequences, pinned
    layers[i]  [slots + snapshots, *shape]  views of rows

Row 0 is padding and always zero; new sequences start from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncllm.attention.base import PrefillRows
from asyncllm.attention.host_pages import HostPages
from asyncllm.attention.recurrence import run, step, tokens_of
from asyncllm.kernels.recurrent.records import Recur, Recurrence, StateLayer
from asyncllm.step_plan import StateMoves

ALIGNMENT = 128  # bytes, of each layer's state in its row
MAX_COPIED_BYTES = 128 << 20  # at a time


class StateLayout:
    """The offset of each layer's state in a row."""

    def __init__(self, layers: Sequence[StateLayer]) -> None:
        self.layers = layers
        self.offsets: list[int] = []  # in bytes
        self.row_bytes = 0
        for layer in layers:
            self.offsets.append(self.row_bytes)
            num_bytes = math.prod(layer.shape) * layer.dtype.itemsize
            self.row_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT


class StateCache:
    def __init__(
        self, layout: StateLayout, num_rows: int, device: torch.device, host_rows: int = 0
    ) -> None:
        self._rows = torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8, device=device)
        self.layers = [
            self._rows[:, offset : offset + math.prod(layer.shape) * layer.dtype.itemsize]
            .view(layer.dtype)
            .unflatten(1, layer.shape)
            for layer, offset in zip(layout.layers, layout.offsets, strict=True)
        ]
        self._host = HostPages((host_rows, layout.row_bytes), torch.uint8, device)

    def before_step(self, moves: StateMoves) -> None:
        """Do the moves that come before a step's forward pass."""
        for slot, host_row in moves.swap_out:
            self._host.tensor[host_row].copy_(self._rows[slot], non_blocking=True)
        self._copy(moves.save)
        self._copy(moves.restore)
        for host_row, slot in moves.swap_in:
            self._rows[slot].copy_(self._host.tensor[host_row], non_blocking=True)

    def after_step(self, moves: StateMoves) -> None:
        self._copy(moves.fork)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows (from, to); no row is both. It copies some at a time, as each copy needs
        temporary memory."""
        if not pairs:
            return
        places = torch.tensor(pairs, dtype=torch.int64, pin_memory=self._rows.is_cuda)
        places = places.to(self._rows.device, non_blocking=True)
        for some in places.split(max(1, MAX_COPIED_BYTES // self._rows.shape[1])):
            source, target = some.unbind(1)
            self._rows[target] = self._rows[source]


class StateBackend(Protocol):
    """Runs recurrences of a step's rows on the cached states. Only enqueues device work."""

    @property
    def cache(self) -> StateCache: ...

    def decode(self, slots: torch.Tensor) -> Recur:
        """Recurrences of one token for each of `slots`, int32 [rows]; the padding slot does not
        change. Can be captured and replayed with other slots."""
        ...

    def mixed(self, decode_slots: torch.Tensor, prefills: PrefillRows) -> Recur:
        """Recurrences of decodes, then of prefills."""
        ...


@dataclass(frozen=True, slots=True)
class TorchStates:
    """The implementation in torch: for the CPU, and as the reference."""

    cache: StateCache

    def decode(self, slots: torch.Tensor) -> Recur:
        rows, is_valid = slots.long(), slots != 0

        def recur(layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
            states = self.cache.layers[layer.index]
            before = states[rows]
            out, moved = step(inputs, before)
            kept = is_valid.view(-1, *(1 for _ in layer.shape))
            states[rows] = torch.where(kept, moved.to(states.dtype), before)
            return out

        return recur

    def mixed(self, decode_slots: torch.Tensor, prefills: PrefillRows) -> Recur:
        num_decodes, decodes = len(decode_slots), self.decode(decode_slots)

        def recur(layer: StateLayer, inputs: Recurrence) -> torch.Tensor:
            states = self.cache.layers[layer.index]
            outputs = [decodes(layer, tokens_of(inputs, slice(num_decodes)))]
            for i, start, end, row in pieces_of(prefills):
                slot = int(prefills.slots[i])
                tokens = tokens_of(inputs, slice(num_decodes + start, num_decodes + end))
                out, moved = run(tokens, states[slot])
                outputs.append(out)
                for target in {slot, row} - {0}:
                    states[target] = moved.to(states.dtype)
            return torch.cat(outputs)

        return recur


def pieces_of(prefills: PrefillRows) -> list[tuple[int, int, int, int]]:
    """Pieces between snapshots: (prefill row, first token, end, row of the snapshot at the end, or
    0), in order."""
    pieces: list[tuple[int, int, int, int]] = []
    for i in range(len(prefills.slots)):
        start, end = prefills.query_indptr[i : i + 2].tolist()
        for _, token, row in prefills.saves[prefills.saves[:, 0] == i].tolist():
            pieces.append((i, start, token, row))
            start = token
        if start < end:
            pieces.append((i, start, end, 0))
    return pieces
