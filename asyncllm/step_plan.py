"""A step's work, as the scheduler describes it to the worker: immutable. No torch.

Rows name slots, pages and positions, never sampled tokens: a plan is made one step ahead, when only
the device knows them. Decodes are columns, which go on from step to step, because a step of 256 of
them must not cost 256 objects; prefills, which are few, are objects.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from asyncllm.types import Sequence


class StepKind(enum.StrEnum):
    DECODE = "decode"  # one token for each of its rows
    PREFILL = "prefill"  # prompts alone
    MIXED = "mixed"  # prompts, and decodes before them
    SWAP = "swap"  # neither

    @classmethod
    def of(cls, num_decodes: int, num_prefill_tokens: int) -> StepKind:
        if not num_prefill_tokens:
            return cls.DECODE if num_decodes else cls.SWAP
        return cls.MIXED if num_decodes else cls.PREFILL


class StepShape(NamedTuple):
    """The key of graphs and of measured step durations."""

    kind: StepKind
    size: int  # rows of a decode step, tokens of others; padding included
    adapters: bool = False  # some row has one


class StepNeed(NamedTuple):
    """The work of one of several engines in lockstep in their next step; by default none."""

    num_decodes: int = 0
    num_prompt_tokens: int = 0
    adapters: bool = False  # some row has one
    fits_graph: bool = True  # as a step with prompts, if there is a graph of its size


class CommonStep(NamedTuple):
    """A step that engines in lockstep do at the same time: of this shape all of them, padding
    included, by the same graph or none."""

    shape: StepShape
    in_graph: bool


@dataclass(slots=True, frozen=True)
class SlotInit:
    """A sequence takes a slot: everything the device must know of it, written before the step."""

    seq: Sequence
    slot: int
    block_ids: list[list[int]]  # by cache group; 0 behind a window
    num_computed: int
    token_ids: list[int]  # all known tokens, a copy: the sequence may grow before the step runs


class PageAppend(NamedTuple):
    """Page `block_id` becomes entry `block_index` of the slot's block table of the group."""

    slot: int
    block_index: int
    block_id: int
    group: int = 0


class StateMoves(NamedTuple):
    """Rows of the state memory that a step moves, where layers are recurrent: slots' and others'
    (engine/state_pool.py). In the order of the fields, the last after the forward pass."""

    swap_out: tuple[tuple[int, int], ...] = ()  # (slot, host row)
    save: tuple[tuple[int, int], ...] = ()  # (slot, snapshot)
    restore: tuple[tuple[int, int], ...] = ()  # (snapshot, or zeros; slot)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host row, slot)
    fork: tuple[tuple[int, int], ...] = ()  # (slot, slot)


NO_STATE_MOVES = StateMoves()


@dataclass(slots=True, frozen=True)
class PrefillRow:
    """`token_ids` at positions start .. start+len-1 of the sequence in `slot`.

    `samples`: sequences that sample their next token from the last position: empty for a chunk
    that is not the last; the row's own sequence, and with n > 1 its forks, for the last.
    `saves`: after so many of its tokens, the row of the state memory that keeps its state.
    """

    seq: Sequence
    slot: int
    start: int
    token_ids: list[int]
    block_ids: list[list[int]]  # by cache group: pages of positions 0 .. start+len-1
    samples: tuple[Sequence, ...]
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, frozen=True, eq=False)
class DecodeBatch:
    """A step's decodes as columns: one token each, at `positions`, whose id is in the slot.

    All of them sample. While the same sequences decode, `seqs` and `slots` are the same objects
    from step to step.
    """

    seqs: tuple[Sequence, ...]
    slots: np.ndarray  # int32 [rows], read-only
    positions: np.ndarray  # int32 [rows], read-only
    ends: np.ndarray  # int32 [rows], read-only: each sequence's num_to_compute
    needs_host: bool = False  # some row does
    adapters: bool = False  # some row's sequence has one

    def __post_init__(self) -> None:
        for column in (self.slots, self.positions, self.ends):
            column.flags.writeable = False

    @classmethod
    def of(cls, seqs: SequenceOf[Sequence]) -> DecodeBatch:
        """The next position of each."""
        return cls(
            tuple(seqs),
            np.array([seq.slot for seq in seqs], np.int32),
            np.array([seq.num_computed for seq in seqs], np.int32),
            np.array([seq.num_to_compute for seq in seqs], np.int32),
            any(seq.needs_host for seq in seqs),
            any(seq.request.adapter_slot for seq in seqs),
        )

    def next(self) -> DecodeBatch:
        """The same sequences, each one position on."""
        if not self.seqs:
            return self
        flags = self.needs_host, self.adapters
        return DecodeBatch(self.seqs, self.slots, self.positions + 1, self.ends, *flags)

    def keep(self, stays: np.ndarray) -> DecodeBatch:
        """The rows where `stays`, bool [rows], is true."""
        if stays.all():
            return self
        seqs = tuple(compress(self.seqs, stays.tolist()))
        needs_host = self.needs_host and any(seq.needs_host for seq in seqs)
        adapters = self.adapters and any(seq.request.adapter_slot for seq in seqs)
        columns = self.slots[stays], self.positions[stays], self.ends[stays]
        return DecodeBatch(seqs, *columns, needs_host, adapters)

    def plus(self, seqs: SequenceOf[Sequence]) -> DecodeBatch:
        """And the next position of each of these."""
        more = DecodeBatch.of(seqs) if seqs else self
        if not seqs or not self.seqs:  # a first prompt after idleness waits for this
            return more
        return DecodeBatch(
            self.seqs + more.seqs,
            np.concatenate((self.slots, more.slots)),
            np.concatenate((self.positions, more.positions)),
            np.concatenate((self.ends, more.ends)),
            self.needs_host or more.needs_host,
            self.adapters or more.adapters,
        )

    def at_block(self, block_size: int, place: int) -> list[Sequence]:
        """Whose token is at this place of a block: 0 is its first, block_size - 1 its last."""
        if not self.seqs:
            return []
        rows = np.flatnonzero(self.positions % block_size == place).tolist()
        return [self.seqs[i] for i in rows]

    def __len__(self) -> int:
        return len(self.seqs)


NO_DECODES = DecodeBatch.of(())


@dataclass(slots=True, frozen=True)
class StepPlan:
    """All that a step does, in the order of its fields from `swap_out` on, then forward, sample.

    Sampled tokens come back in the order of `sampled`: the decodes, then each prefill's samples.
    """

    step_id: int
    decodes: DecodeBatch
    prefills: tuple[PrefillRow, ...]
    swap_out: tuple[tuple[int, int], ...] = ()  # (device page, host page)
    page_copies: tuple[tuple[int, int], ...] = ()  # (from, to), both on the device
    swap_in: tuple[tuple[int, int], ...] = ()  # (host page, device page)
    slot_inits: tuple[SlotInit, ...] = ()
    page_appends: tuple[PageAppend, ...] = ()
    states: StateMoves = NO_STATE_MOVES

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.prefills)

    @property
    def needs_host(self) -> bool:
        """Whether its sampling is launched by itself, after the tokens of the step before."""
        if self.decodes.needs_host:
            return True
        return any(seq.needs_host for row in self.prefills for seq in row.samples)

    @property
    def adapters(self) -> bool:
        """Whether some row's sequence has an adapter."""
        if self.decodes.adapters:
            return True
        return any(row.seq.request.adapter_slot for row in self.prefills)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        if not self.prefills:
            return self.decodes.seqs
        return self.decodes.seqs + tuple(seq for row in self.prefills for seq in row.samples)
