"""The static input buffers of steps: what graphs read, always at the same addresses.

One copy brings a step's, on CUDA from rotating pinned buffers; a step of the same decodes as the
last one, with no new page, needs none. Changes of slots come with it, and are written from here to
the device state: by a captured launch of its own, or as part of a step's graph.

What is beyond the step's rows and changes of slots is 0: the padding slot, which may be written so.
Of the arrays of tokens, what the decodes have is for `FillDecodes` to fill, and beyond the step's
tokens `write_slots` is 0, the padding page; the rest is stale, which is harmless.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np
import torch

from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.packed_step import NO_CHANGES, NO_ROWS, A, PackedStep, SlotChanges
from asyncllm.worker.slot_changes import RECORD_WORDS, WriteSlots

ROW_ARRAYS = ("decode_slots", "sample_tokens", "sample_slots", "sample_positions")
TOKEN_ARRAYS = ("token_ids", "positions", "slots")  # and write_slots, of 64 bits
# Places for changes of slots, all brought and written whether full or not. Even numbers.
MAX_RECORDS = 64  # sequences that take slots
MAX_ENTRIES = 1024  # pages
# One being read, one launched ahead, one being written; and those of a burst of sequences, whose
# changes come in several pieces.
NUM_BUFFERS = 6


class StaticInputs:
    """Holds steps of at most `max_rows` rows, and `max_tokens` tokens of steps with prefills."""

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
        self._decode_slots: np.ndarray | None = None  # that are there, as far as the host knows
        self._writing: Recorded | None = None  # `launch_changes`

    def put_decodes(self, slots: np.ndarray, changes: SlotChanges) -> None:
        """The rows of a step of decodes alone, unless they are those of the last step. Its changes
        are written."""
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
        """A step with prompts; `write_changes`, or its graph, writes its changes. num_tokens: of
        the graph that will read it; None: it reads no tokens."""
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
            arrays.write_slots[:, end:num_tokens] = 0
            self._ours.whole.copy_(tensors.whole, non_blocking=True)

    def _write_most(self, changes: SlotChanges) -> SlotChanges:
        """Write what one step's inputs have no room for; the rest, returned, comes with them."""
        if changes is NO_CHANGES:
            return changes
        *pieces, last = changes.split(MAX_RECORDS, MAX_ENTRIES)
        for piece in pieces:
            self.put_decodes(NO_ROWS, piece)
        return last

    def launch_changes(self) -> tuple[()]:
        """Write the changes that are there to the device state. May be captured."""
        self._write_slots(self._state, self._ours.records, self._ours.entries)
        return ()

    def capture_changes(self, pool: GraphPool) -> None:
        """Triton's launcher takes four times as long as a replay."""
        self._writing = pool.record(self.launch_changes)

    def write_changes(self) -> None:
        """`launch_changes`, by a replay where it was captured."""
        if self._writing is None:
            self.launch_changes()
        else:
            self._writing.replay()

    def clear(self) -> None:
        """Nothing of the last step is there: no decodes, no changes, and all that is written goes
        to the padding page."""
        self._decode_slots = None
        self._ours.whole.zero_()

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Words of rows, records, entries; of tokens, write_slots."""
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
        """The host's, and its arrays."""
        whole = self._ours.whole
        memory = torch.zeros(len(whole), dtype=torch.int32, pin_memory=whole.is_cuda)
        tensors = self._split(memory)
        return tensors, _Parts(*(part.numpy() for part in tensors))


class _Parts(NamedTuple, Generic[A]):
    whole: A
    head: A  # rows, records and entries: what steps bring that bring no tokens
    rows: A  # [4, max_rows]
    records: A
    entries: A
    tokens: A  # [3, max_tokens]
    write_slots: A  # [groups, max_tokens]


def _begin(arrays: _Parts[np.ndarray], decode_slots: np.ndarray, changes: SlotChanges) -> None:
    """Write the head: these slots and changes, and zeros beyond them."""
    arrays.head[:] = 0
    arrays.rows[0, : len(decode_slots)] = decode_slots
    if changes.records is not None:
        arrays.records[: len(changes.records)] = changes.records
    if changes.entries is not None:
        arrays.entries[:, : changes.entries.shape[1]] = changes.entries
