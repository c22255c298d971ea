"""One step, as the scheduler gives it to the worker: immutable, without torch.

A plan names slots, pages and positions but no sampled tokens: it is made one step ahead, when only
the device has them. Decodes are arrays that carry over from step to step, because 256 decodes must
not cost 256 objects. Prefills are few, so each is an object.
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
    DECODE = "decode"  # every row has one token
    PREFILL = "prefill"  # prompt chunks only
    MIXED = "mixed"  # decodes, then prompt chunks
    SWAP = "swap"  # page and state moves only

    @classmethod
    def of(cls, num_decodes: int, num_prefill_tokens: int) -> StepKind:
        if not num_prefill_tokens:
            return cls.DECODE if num_decodes else cls.SWAP
        return cls.MIXED if num_decodes else cls.PREFILL


class StepShape(NamedTuple):
    """The key of captured graphs and of measured step durations."""

    kind: StepKind
    size: int  # rows of a decode step, else tokens; padding included
    adapters: bool = False  # some row has a LoRA adapter


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
    """A sequence takes a slot. All of its device state is written before the step."""

    seq: Sequence
    slot: int
    block_ids: list[list[int]]  # per cache group; 0 for blocks that a window has passed
    num_computed: int
    token_ids: list[int]  # all known tokens, a copy: the sequence may grow before the step runs


class PageAppend(NamedTuple):
    """Page `block_id` becomes entry `block_index` of the slot's block table in `group`."""

    slot: int
    block_index: int
    block_id: int
    group: int = 0


class StateMoves(NamedTuple):
    """Copies between rows of the recurrent state memory (engine/state_pool.py), done in the order
    of the fields: `fork` after the forward pass, the others before it."""

    swap_out: tuple[tuple[int, int], ...] = ()  # (slot, host row)
    save: tuple[tuple[int, int], ...] = ()  # (slot, snapshot)
    restore: tuple[tuple[int, int], ...] = ()  # (snapshot, or the row of zeros; slot)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host row, slot)
    fork: tuple[tuple[int, int], ...] = ()  # (slot, slot)


NO_STATE_MOVES = StateMoves()


@dataclass(slots=True, frozen=True)
class PrefillRow:
    """`token_ids` at positions start .. start+len-1 of the sequence in `slot`.

    samples: the sequences that sample from the last position: none before a prompt's last chunk,
    then the row's own sequence and, with n > 1, its forks.
    saves: (number of tokens, snapshot row): where recurrent states are saved within the chunk.
    """

    seq: Sequence
    slot: int
    start: int
    token_ids: list[int]
    block_ids: list[list[int]]  # per cache group: pages of positions 0 .. start+len-1
    samples: tuple[Sequence, ...]
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, frozen=True, eq=False)
class DecodeBatch:
    """A step's decodes as columns. Row i computes one token at `positions[i]`, whose id the device
    has in `slots[i]`, and samples the next.

    While the same sequences decode, `seqs` and `slots` stay the same objects from step to step.
    """

    seqs: tuple[Sequence, ...]
    slots: np.ndarray  # int32 [rows], read-only
    positions: np.ndarray  # int32 [rows], read-only
    ends: np.ndarray  # int32 [rows], read-only: each sequence's num_to_compute
    needs_host: bool = False  # some row is a host row
    adapters: bool = False  # some row has a LoRA adapter

    def __post_init__(self) -> None:
        for column in (self.slots, self.positions, self.ends):
            column.flags.writeable = False

    @classmethod
    def of(cls, seqs: SequenceOf[Sequence]) -> DecodeBatch:
        """Decodes of each sequence's next position."""
        return cls(
            tuple(seqs),
            np.array([seq.slot for seq in seqs], np.int32),
            np.array([seq.num_computed for seq in seqs], np.int32),
            np.array([seq.num_to_compute for seq in seqs], np.int32),
            any(seq.needs_host for seq in seqs),
            any(seq.request.adapter_slot for seq in seqs),
        )

    def next(self) -> DecodeBatch:
        """The same sequences, one position later."""
        if not self.seqs:
            return self
        flags = self.needs_host, self.adapters
        return DecodeBatch(self.seqs, self.slots, self.positions + 1, self.ends, *flags)

    def keep(self, stays: np.ndarray) -> DecodeBatch:
        """The rows where `stays`, bool [rows], is set."""
        if stays.all():
            return self
        seqs = tuple(compress(self.seqs, stays.tolist()))
        needs_host = self.needs_host and any(seq.needs_host for seq in seqs)
        adapters = self.adapters and any(seq.request.adapter_slot for seq in seqs)
        columns = self.slots[stays], self.positions[stays], self.ends[stays]
        return DecodeBatch(seqs, *columns, needs_host, adapters)

    def plus(self, seqs: SequenceOf[Sequence]) -> DecodeBatch:
        """These rows, then the next position of each of `seqs`."""
        more = DecodeBatch.of(seqs) if seqs else self
        if not seqs or not self.seqs:  # a shortcut on the way to a first token
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
        """The sequences whose token is at this offset within its block."""
        if not self.seqs:
            return []
        rows = np.flatnonzero(self.positions % block_size == place).tolist()
        return [self.seqs[i] for i in rows]

    def __len__(self) -> int:
        return len(self.seqs)


NO_DECODES = DecodeBatch.of(())


@dataclass(slots=True, frozen=True)
class StepPlan:
    """All work of one step: the moves from `swap_out` on, in the order of the fields; then the
    forward pass and sampling.

    Sampled tokens come back in the order of `sampled`: decodes, then each prefill's samples.
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
        """Whether sampling is launched separately, once the step before is finished."""
        if self.decodes.needs_host:
            return True
        return any(seq.needs_host for row in self.prefills for seq in row.samples)

    @property
    def adapters(self) -> bool:
        """Whether some row has a LoRA adapter."""
        if self.decodes.adapters:
            return True
        return any(row.seq.request.adapter_slot for row in self.prefills)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        if not self.prefills:
            return self.decodes.seqs
        return self.decodes.seqs + tuple(seq for row in self.prefills for seq in row.samples)
