"""Rows of the recurrent state memory besides the slots': snapshots, and swapped states. No torch.

A slot's state is in the row of the slot's number. After these rows come snapshots: the state after
a block of a prompt or an answer, under the block's hash, in a pool as for pages (the least recently
used one is overwritten). A snapshot can be found by steps after the one that writes it.
Invariants: `check_integrity()`.
"""

from __future__ import annotations

from asyncllm.engine.page_pool import PagePool
from asyncllm.types import PADDING_SLOT


class StatePool:
    def __init__(self, num_slots: int, num_snapshots: int, num_host_rows: int) -> None:
        """num_slots: including the padding slot."""
        self._snapshots = PagePool(num_snapshots, first=num_slots)
        self.host = PagePool(num_host_rows)
        self._written: list[tuple[int, bytes]] = []  # (row, hash) that the last plan writes
        self._swapped: dict[int, int] = {}  # seq_id -> host row

    def has(self, block_hash: bytes) -> bool:
        return self._snapshots.find(block_hash) is not None

    def source(self, block_hash: bytes | None) -> int:
        """The row that a sequence starts from: the snapshot after this block, which counts as used,
        or without a block the row of zeros."""
        if block_hash is None:
            return PADDING_SLOT
        row = self._snapshots.find(block_hash)
        assert row is not None, "a snapshot was evicted between its match and its use"
        self._snapshots.share(row)
        self._snapshots.release([row])
        return row

    def save(self, block_hash: bytes) -> int | None:
        """A row for a snapshot that the step being planned writes. None if there is one already, or
        no free row."""
        if self.has(block_hash) or not self._snapshots.num_free:
            return None
        (row,) = self._snapshots.take(1)
        self._written.append((row, block_hash))
        return row

    def expire(self, block_hash: bytes) -> None:
        """Make this snapshot, if there is one, the next to be overwritten."""
        self._snapshots.expire(block_hash)

    def publish_written(self) -> None:
        """Make the last plan's snapshots findable for the next plans."""
        for row, block_hash in self._written:
            self._snapshots.publish([row], [block_hash])
        self._release_written()

    def forget_all(self) -> None:
        self._release_written()
        self._snapshots.forget_all()

    def _release_written(self) -> None:
        self._snapshots.release(row for row, _ in self._written)
        self._written.clear()

    def swap_out(self, seq_id: int) -> int:
        """A host row for a sequence's state; one must be free."""
        (row,) = self.host.take(1)
        self._swapped[seq_id] = row
        return row

    def leave_host(self, seq_id: int) -> int | None:
        """Free and return the host row of a sequence's state, which the next step may still read.
        None if it has none."""
        row = self._swapped.pop(seq_id, None)
        if row is not None:
            self.host.release([row])
        return row

    def check_integrity(self) -> None:
        self._snapshots.check_integrity({row: 1 for row, _ in self._written})
        self.host.check_integrity(dict.fromkeys(self._swapped.values(), 1))
