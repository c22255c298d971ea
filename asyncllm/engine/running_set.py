"""The running sequences: who holds which slot, and the batch of those that decode.

It knows no pages and decides nothing. While the same sequences decode, a step's batch is the one
before with every position moved by one, and only rows at the start of a block can need a page; so a
step of 256 rows costs the host a few numpy calls. Any change of members rebuilds the batch, which
happens in most steps where answers are short: a few list comprehensions, and no call per row.
Invariant: `check_integrity()`; `seqs` is in order of service.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable

from asyncllm.types import NO_DECODES, PADDING_SLOT, DecodeBatch, Sequence, SequenceStatus


class RunningSet:
    """At most `max_num_seqs` sequences, in slots numbered from 1. `key`: the order of service."""

    def __init__(self, max_num_seqs: int, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self.seqs: list[Sequence] = []
        self.forked: set[Sequence] = set()  # members that may share the page they write to
        self.rewritten: set[Sequence] = set()  # members that are not as their slots say
        self.jumped: list[Sequence] = []  # members that jumped since the last plan
        self._beams: set[Sequence] = set()  # members that search
        self._host_rows: set[Sequence] = set()  # members that need the host
        self._key = key
        self._free_slots: deque[int] = deque(range(1, max_num_seqs + 1))
        self._max_num_seqs = max_num_seqs
        self._batch = NO_DECODES  # of the next step, unless it is to be rebuilt
        self._changed = False  # members came, went, or begin to decode
        self._num_steps_left = 0  # until a member of the batch has sampled its last token

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def add(self, seq: Sequence) -> None:
        seq.slot = self._free_slots.popleft()
        seq.status = SequenceStatus.RUNNING
        insort(self.seqs, seq, key=self._key)
        if seq.request.sampling_params.use_beam_search:
            self._beams.add(seq)
        if seq.needs_host:
            self._host_rows.add(seq)
        self._changed = True

    def remove(self, seq: Sequence) -> None:
        """`seq` gives its slot back; its new status is the caller's to set."""
        self.seqs.remove(seq)
        for members in (self.forked, self.rewritten, self._beams, self._host_rows):
            members.discard(seq)
        if seq in self.jumped:
            self.jumped.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = PADDING_SLOT
        self._changed = True

    def set_changed(self) -> None:
        """A member's prefill is planned to its end: it decodes from the next step on."""
        self._changed = True

    def jump(self, seq: Sequence) -> None:
        """A member that decodes knows more tokens than it has computed: they are a prefill."""
        seq.num_prefill = len(seq.token_ids)
        self.jumped.append(seq)
        if _counts_tokens(seq):  # as its slot does, of those that it samples
            self.rewritten.add(seq)
        self._changed = True

    def in_order(self, seqs: list[Sequence]) -> list[Sequence]:
        """These members, each once, in order of service."""
        return sorted(set(seqs), key=self._key)

    def take_jumped(self) -> list[Sequence]:
        """Once for each jump; in order of service."""
        taken, self.jumped = self.in_order(self.jumped), []
        return taken

    def prefilling(self) -> list[Sequence]:
        if not self._changed and len(self._batch) == len(self.seqs):
            return []
        return [seq for seq in self.seqs if seq.num_computed < seq.num_prefill]

    # --- the decode batch --------------------------------------------------------------------

    def next_batch(self) -> DecodeBatch:
        """One token of each that may decode, in order of service; the same until it is taken."""
        if self._changed or self._num_steps_left == 0:
            self._rebuild()
        return self._batch

    def take_batch(self) -> DecodeBatch:
        """The next batch, as it is after any preemption; its sequences are advanced."""
        batch = self.next_batch()
        for seq in batch.seqs:
            seq.num_computed += 1
            seq.num_in_flight += 1
        self._batch = batch.next()
        self._num_steps_left -= 1
        return batch

    def _rebuild(self) -> None:
        beams = self._beams
        seqs = [  # all that `may_decode`
            seq
            for seq in self.seqs
            if seq.num_prefill <= seq.num_computed < seq.num_to_compute
            and not seq.held
            and (seq.num_in_flight == 0 or seq not in beams)
        ]
        # A first prompt after idleness waits for this: ten numpy calls fewer are 50 us of it.
        self._batch, self._num_steps_left = NO_DECODES, 1
        if seqs:
            needs_host = not self._host_rows.isdisjoint(seqs)
            positions = [seq.num_computed for seq in seqs]
            self._batch = DecodeBatch.of(tuple(seqs), positions, needs_host)
            self._num_steps_left = min([seq.num_to_compute - seq.num_computed for seq in seqs])
        # A beam is in every second batch, or waits longer: rebuild each time.
        self._changed = bool(beams)

    def check_integrity(self) -> None:
        slots = [seq.slot for seq in self.seqs]
        assert len(set(slots)) == len(slots), f"a slot is held twice: {slots}"
        assert sorted([*slots, *self._free_slots]) == list(range(1, self._max_num_seqs + 1))
        keys = [self._key(seq) for seq in self.seqs]
        assert keys == sorted(keys), "the running sequences are out of order"
        remembered = self.forked | self.rewritten | set(self.jumped) | self._beams | self._host_rows
        assert remembered <= set(self.seqs), "a fork, beam or jump is remembered that does not run"
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.seqs)
        if not self._changed and self._num_steps_left > 0:
            members = [seq for seq in self.seqs if may_decode(seq)]
            assert list(self._batch.seqs) == members, "the batch is out of date"
            needs_host = any(seq.needs_host for seq in members)
            assert self._batch.needs_host == needs_host, "the batch knows its host rows wrongly"
            for row in self._batch:
                assert (row.slot, row.position) == (row.seq.slot, row.seq.num_computed)


def may_decode(seq: Sequence) -> bool:
    """False for a prefill, and for a beam that waits for its token or for other beams."""
    if seq.held or not seq.num_prefill <= seq.num_computed < seq.num_to_compute:
        return False
    return seq.num_in_flight == 0 or not seq.request.sampling_params.use_beam_search


def _counts_tokens(seq: Sequence) -> bool:
    """Whether what it has said changes its logits."""
    params = seq.request.sampling_params
    penalties = params.presence_penalty or params.frequency_penalty
    return bool(penalties) or params.repetition_penalty != 1
