"""The running sequences: their slots, and the batch of those that decode.

It knows no pages and takes no decisions. While the same sequences decode, a step's batch is the
last one with all positions incremented, so a step of 256 rows costs a few numpy calls. When a
sequence leaves or joins, only its row is processed, as long as the one that joins is the youngest.
Invariants: `check_integrity()`; `seqs` is in scheduling order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

import numpy as np

from asyncllm.step_plan import NO_DECODES, DecodeBatch
from asyncllm.types import PADDING_SLOT, Sequence, SequenceStatus


class RunningSet:
    """Holds at most one sequence per slot. key: the scheduling order. fair_share: the most
    sequences to admit, if there are other sets; None: no limit."""

    def __init__(self, slots: range, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self.slots = slots
        self.fair_share: int | None = None
        self.seqs: list[Sequence] = []
        self.forced: list[Sequence] = []  # got forced tokens since the last plan
        self._forked: set[Sequence] = set()  # may share the page that they write to
        self._rewritten: set[Sequence] = set()  # their slots' state must be written again
        self._left: set[Sequence] = set()  # decode no more, but may still be in the batch
        self._joining: set[Sequence] = set()  # may decode, but are not in the batch yet
        self._key = key
        self._free_slots = deque(slots)
        self._batch = NO_DECODES  # of the next step, before `_left` and `_joining` are applied
        self._num_steps_left = 0  # until a sequence of the batch has sampled its last token

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_admissible(self) -> int:
        if self.fair_share is None:
            return len(self._free_slots)
        return min(len(self._free_slots), max(self.fair_share - len(self.seqs), 0))

    @property
    def is_idle(self) -> bool:
        """No sequence runs, and the batch is empty."""
        return not (self.seqs or self._left)

    def add(self, seq: Sequence) -> None:
        seq.slot = self._free_slots.popleft()
        seq.status = SequenceStatus.RUNNING
        insort(self.seqs, seq, key=self._key)
        self._joining.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Free the slot of `seq`. The caller sets its new status."""
        del self.seqs[bisect_left(self.seqs, self._key(seq), key=self._key)]
        self._forked.discard(seq)
        self._rewritten.discard(seq)
        self._leave(seq)
        if seq in self.forced:
            self.forced.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = PADDING_SLOT

    def join(self, seq: Sequence) -> None:
        """The prefill of `seq` is planned to its end: it decodes from the next step on."""
        self._joining.add(seq)

    def _leave(self, seq: Sequence) -> None:
        self._joining.discard(seq)
        self._left.add(seq)

    def jump_forward(self, seq: Sequence) -> None:
        """`seq` got forced tokens, which are computed as a prefill."""
        seq.num_prefill = len(seq.token_ids)
        self.forced.append(seq)
        if seq.request.sampling_params.penalises:  # its token counts change without decodes
            self._rewritten.add(seq)
        self._leave(seq)

    def in_order(self, seqs: list[Sequence]) -> list[Sequence]:
        """These sequences, each once, in scheduling order."""
        return sorted(set(seqs), key=self._key)

    @property
    def has_forks(self) -> bool:
        """Whether a sequence may write to a shared page next."""
        return bool(self._forked)

    def note_fork(self, parent: Sequence, child: Sequence) -> None:
        """Two sequences share all pages, until each has decoded once."""
        self._forked |= {parent, child}

    def take_rewritten(self) -> list[Sequence]:
        """Sequences whose slots must be written again, in scheduling order."""
        taken, self._rewritten = self._rewritten, set()
        return sorted(taken, key=self._key)

    def take_forced(self) -> list[Sequence]:
        """Sequences that got forced tokens since the last call, in scheduling order."""
        taken, self.forced = self.in_order(self.forced), []
        return taken

    def prefilling(self) -> list[Sequence]:
        if not self._left and len(self._batch) == len(self.seqs):
            return []
        return [seq for seq in self.seqs if seq.num_computed < seq.num_prefill]

    # --- the decode batch --------------------------------------------------------------------

    def next_batch(self) -> DecodeBatch:
        """The decodes of the next step, in scheduling order."""
        if self._left or self._joining or self._num_steps_left == 0:
            self._update()
        return self._batch

    def take_batch(self) -> DecodeBatch:
        """Take the next batch, after any preemption, and advance its sequences."""
        batch = self.next_batch()
        for seq in batch.seqs:
            seq.num_computed += 1
            seq.num_in_flight += 1
        if self._forked:
            self._forked.difference_update(batch.seqs)
        self._batch = batch.next()
        self._num_steps_left -= 1
        return batch

    def _update(self) -> None:
        """Remove rows that have left or sampled their last token; add those that join."""
        batch, joining = self._batch, sorted(self._joining, key=self._key)
        overtakes = joining and batch.seqs and self._key(joining[0]) < self._key(batch.seqs[-1])
        if overtakes:
            batch, joining = NO_DECODES, self.seqs
        if batch.seqs:
            batch = batch.keep(self._staying(batch))
        self._batch = batch = batch.plus([seq for seq in joining if may_decode(seq)])
        self._num_steps_left = int((batch.ends - batch.positions).min()) if batch.seqs else 1
        self._left.clear()
        self._joining.clear()

    def _staying(self, batch: DecodeBatch) -> np.ndarray:
        """Which rows stay: bool [rows]."""
        stays = batch.positions < batch.ends
        for seq in self._left:
            row = bisect_left(batch.seqs, self._key(seq), key=self._key)
            if row < len(batch) and batch.seqs[row] is seq:
                stays[row] = False
        return stays

    def check_integrity(self) -> None:
        slots = [seq.slot for seq in self.seqs]
        assert len(set(slots)) == len(slots), f"a slot is held twice: {slots}"
        assert sorted([*slots, *self._free_slots]) == list(self.slots)
        keys = [self._key(seq) for seq in self.seqs]
        assert keys == sorted(keys), "the running sequences are out of order"
        remembered = self._forked | self._rewritten | set(self.forced) | self._joining
        assert remembered <= set(self.seqs), (
            "a fork or forced tokens are remembered that do not run"
        )
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.seqs)
        if not (self._left or self._joining) and self._num_steps_left > 0:
            members = [seq for seq in self.seqs if may_decode(seq)]
            assert list(self._batch.seqs) == members, "the batch is out of date"
            needs_host = any(seq.needs_host for seq in members)
            assert self._batch.needs_host == needs_host, "the batch knows its host rows wrongly"
            assert self._batch.slots.tolist() == [seq.slot for seq in members]
            assert self._batch.positions.tolist() == [seq.num_computed for seq in members]
            ends = [seq.num_to_compute for seq in members]
            assert self._batch.ends.tolist() == ends, "the batch knows its rows' ends wrongly"


def may_decode(seq: Sequence) -> bool:
    """Whether its whole prefill is planned, and its last token is not."""
    return seq.num_prefill <= seq.num_computed < seq.num_to_compute
