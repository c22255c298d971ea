"""The static input buffers that graphs read, always at the same addresses.

A step's inputs arrive in one copy, on CUDA from rotating pinned buffers. A step with the same
decodes as the last one, and no new pages, needs no copy. Slot changes are part of the copy, and are
applied to the device state by a captured launch of their own, or as part of a step's graph.

Entries after the step's rows and slot changes are 0, which stands for the padding slot. In the
token arrays `FillDecodes` fills the decodes' part. After the step's tokens `slots` has the padding
slot and `write_slots` 0, the padding page; other entries there are stale, which is harmless.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np
import torch

from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.types import PADDING_SLOT
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.packed_step import NO_CHANGES, NO_ROWS, A, PackedStep, SlotChanges
from asyncllm.worker.slot_changes import RECORD_WORDS, WriteSlots

ROW_ARRAYS = ("decode_slots", "sample_tokens", "sample_slots", "sample_positions")
TOKEN_ARRAYS = ("token_ids", "positions", "slots")  # and write_slots, which is int64
SLOTS = TOKEN_ARRAYS.index("slots")
# Slot changes per copy; all are copied and applied, even if unused. Even numbers.
MAX_RECORDS = 64  # sequences that take slots
MAX_ENTRIES = 1024  # pages
# One being read, one launched ahead, one being written; and more for a burst of new sequences,
# whose changes come in several copies.
NUM_BUFFERS = 6


class StaticInputs:
    """Holds steps of up to `max_rows` rows; mixed steps have up to `max_tokens` tokens."""

    def __init__(
        self, max_tokens: int, max_rows: int, state: DeviceState, write_slots: WriteSlots
    ) -> None:
        max_tokens += max_tokens % 2  # 64-bit numbers follow
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._state, self._write_slots = state, write_slots
        self._num_groups = len(state.block_tables)
        device = state.positions.device
        memory = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self._ours = ours = self._split(memory)
        self._buffers = RotatingBuffers([self._new_buffer() for _ in range(NUM_BUFFERS)], device)
        self.decode_slots, self.sample_tokens, self.sample_slots, self.sample_positions = ours.rows
        self.token_ids, self.positions, self.slots = ours.tokens
        self.write_slots = ours.write_slots
        self._decode_slots: np.ndarray | None = None  # the decode slots that it holds, if known
        self._writing: Recorded | None = None  # `launch_changes`

    def put_decodes(self, slots: np.ndarray, changes: SlotChanges) -> None:
        """Copy the rows of a decode step, unless it holds them already, and apply slot changes."""
        held, changes = self._decode_slots, self._write_most(changes)
        is_held = slots is held or (held is not None and np.array_equal(slots, held))
        if is_held and changes is NO_CHANGES:
            return
        self._decode_slots = slots
        with self._buffers as (tensors, arrays):
            _begin(arrays, slots, changes)
            self._ours.head.copy_(tensors.head, non_blocking=True)
        if changes is not NO_CHANGES:
            self.write_changes()

    def put(self, step: PackedStep, num_tokens: int | None) -> None:
        """Copy a mixed step's inputs. `write_changes`, or the step's graph, applies slot changes.
        num_tokens: of the graph that reads the tokens; None: they are not copied."""
        changes, first = self._write_most(step.changes), len(step.decode_slots)
        self._decode_slots = step.decode_slots
        with self._buffers as (tensors, arrays):
            _begin(arrays, step.decode_slots, changes)
            arrays.rows[1:, : step.samples.shape[1]] = step.samples
            if num_tokens is None:
                self._ours.head.copy_(tensors.head, non_blocking=True)
                return
            end, num_arrays = first + step.tokens.shape[1], len(TOKEN_ARRAYS)
            arrays.tokens[:, first:end] = step.tokens[:num_arrays]
            arrays.write_slots[:, first:end] = step.tokens[num_arrays:]
            arrays.tokens[SLOTS, end:num_tokens] = PADDING_SLOT
            arrays.write_slots[:, end:num_tokens] = 0
            self._ours.whole.copy_(tensors.whole, non_blocking=True)

    def _write_most(self, changes: SlotChanges) -> SlotChanges:
        """Apply slot changes that do not fit into one copy. Returns the rest, for the step's
        copy."""
        if changes is NO_CHANGES:
            return changes
        *pieces, last = changes.split(MAX_RECORDS, MAX_ENTRIES)
        for piece in pieces:
            self.put_decodes(NO_ROWS, piece)
        return last

    def launch_changes(self) -> tuple[()]:
        """Apply the copied slot changes to the device state. Capturable."""
        self._write_slots(self._state, self._ours.records, self._ours.entries)
        return ()

    def capture_changes(self, pool: GraphPool) -> None:
        """Capture `launch_changes`: a replay takes a quarter of the time of Triton's launcher."""
        self._writing = pool.record(self.launch_changes)

    def write_changes(self) -> None:
        """`launch_changes`, as a replay if it was captured."""
        if self._writing is None:
            self.launch_changes()
        else:
            self._writing.replay()

    def clear(self) -> None:
        """Zero all inputs: no decodes, no changes, and all KV goes to the padding page."""
        self._decode_slots = None
        self._ours.whole.zero_()

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Sizes in words: rows, records, entries; tokens, write_slots."""
        head = len(ROW_ARRAYS) * self._max_rows, MAX_RECORDS * RECORD_WORDS, 3 * MAX_ENTRIES
        return *head, len(TOKEN_ARRAYS) * self._max_tokens, self._num_groups * 2 * self._max_tokens

    def _split(self, memory: torch.Tensor) -> _Parts[torch.Tensor]:
        rows, records, entries, tokens, write_slots = memory.split(self._sizes)
        return _Parts(
            memory,
            memory[: sum(self._sizes[:3])],
            rows.view(len(ROW_ARRAYS), self._max_rows),
            records.view(MAX_RECORDS, RECORD_WORDS),
            entries.view(3, MAX_ENTRIES),
            tokens.view(len(TOKEN_ARRAYS), self._max_tokens),
            write_slots.view(torch.int64).view(self._num_groups, self._max_tokens),
        )

    def _new_buffer(self) -> tuple[_Parts[torch.Tensor], _Parts[np.ndarray]]:
        """A host buffer, as tensors and as arrays."""
        whole = self._ours.whole
        memory = torch.zeros(len(whole), dtype=torch.int32, pin_memory=whole.is_cuda)
        tensors = self._split(memory)
        return tensors, _Parts(*(part.numpy() for part in tensors))


class _Parts(NamedTuple, Generic[A]):
    whole: A
    head: A  # rows, records and entries: all that steps without prefills need
    rows: A  # [4, max_rows]
    records: A
    entries: A
    tokens: A  # [3, max_tokens]
    write_slots: A  # [groups, max_tokens]


def _begin(arrays: _Parts[np.ndarray], decode_slots: np.ndarray, changes: SlotChanges) -> None:
    """Write slots and changes to the head, and zeros after them."""
    arrays.head[:] = 0
    arrays.rows[0, : len(decode_slots)] = decode_slots
    if changes.records is not None:
        arrays.records[: len(changes.records)] = changes.records
    if changes.entries is not None:
        arrays.entries[:, : changes.entries.shape[1]] = changes.entries
