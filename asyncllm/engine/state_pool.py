"""Rows of the state memory that no slot owns: snapshots of prefixes, and swapped states. No torch.

A slot's own row has the slot's number. Behind them are the snapshots: what recurrent layers keep
after a block of a prompt or of an answer, under the hash of that block, in a pool as pages have one
(the least recently used is overwritten). A snapshot is findable for the steps after the one that
writes it.
Invariant: `check_integrity()`.
"""

from __future__ import annotations

from asyncllm.engine.page_pool import PagePool
from asyncllm.types import PADDING_SLOT


class StatePool:
    def __init__(self, num_slots: int, num_snapshots: int, num_host_rows: int) -> None:
        """num_slots: the padding slot included."""
        self._snapshots = PagePool(num_snapshots, first=num_slots)
        self.host = PagePool(num_host_rows)
        self._written: list[tuple[int, bytes]] = []  # by the last plan: row, hash
        self._swapped: dict[int, int] = {}  # seq_id -> host row

    def has(self, block_hash: bytes) -> bool:
        return self._snapshots.find(block_hash) is not None

    def source(self, block_hash: bytes | None) -> int:
        """The row that a sequence starts from: the snapshot after this block, in use just now; or
        zeros."""
        if block_hash is None:
            return PADDING_SLOT
        row = self._snapshots.find(block_hash)
        assert row is not None, "a snapshot was taken away between its match and its use"
        self._snapshots.share(row)
        self._snapshots.release([row])
        return row

    def save(self, block_hash: bytes) -> int | None:
        """The row for a snapshot that the step being planned will write; None: there is one, or no
        room."""
        if self.has(block_hash) or not self._snapshots.num_free:
            return None
        (row,) = self._snapshots.take(1)
        self._written.append((row, block_hash))
        return row

    def expire(self, block_hash: bytes) -> None:
        """Where there is such a snapshot, it is the next to be overwritten."""
        self._snapshots.expire(block_hash)

    def publish_written(self) -> None:
        """Those of the last plan: who is planned from here on finds them."""
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
        """The host row for its state; one is free."""
        (row,) = self.host.take(1)
        self._swapped[seq_id] = row
        return row

    def leave_host(self, seq_id: int) -> int | None:
        """Give the host row of its state back, which the next step may still read; None where it
        has none."""
        row = self._swapped.pop(seq_id, None)
        if row is not None:
            self.host.release([row])
        return row

    def check_integrity(self) -> None:
        self._snapshots.check_integrity({row: 1 for row, _ in self._written})
        self.host.check_integrity(dict.fromkeys(self._swapped.values(), 1))
