"""A step's plan in the making: what the scheduler has decided so far of one step."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from asyncllm.step_plan import NO_DECODES, DecodeBatch, PageAppend, PrefillRow, SlotInit, StepPlan
from asyncllm.types import Sequence


@dataclass(slots=True)
class StepDraft:
    """`budget`: prompt tokens that the step may still take. The lists become the plan's fields.

    `to_end`, `shared`: as of chunk_policy's `Room`, the latter less what was taken.
    """

    budget: int = 0
    to_end: int = 0
    shared: int = sys.maxsize
    preempted: bool = False  # then nothing is admitted: memory is short
    decodes: DecodeBatch = NO_DECODES
    prefills: list[PrefillRow] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    slot_inits: list[SlotInit] = field(default_factory=list)
    page_appends: list[PageAppend] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.decodes or self.prefills or self.swap_out)

    def init_slot(self, seq: Sequence, block_ids: list[int]) -> None:
        """All that the device must know of `seq`, which owns a slot and these pages."""
        self.slot_inits.append(
            SlotInit(seq, seq.slot, block_ids, seq.num_computed, list(seq.token_ids))
        )

    def take(self, num_tokens: int) -> None:
        """The next tokens of a prompt."""
        self.shared -= num_tokens
        self.budget = min(self.budget - num_tokens, self.shared)

    def finish(self, step_id: int) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            decodes=self.decodes,
            prefills=tuple(self.prefills),
            swap_out=tuple(self.swap_out),
            page_copies=tuple(self.page_copies),
            swap_in=tuple(self.swap_in),
            slot_inits=tuple(self.slot_inits),
            page_appends=tuple(self.page_appends),
        )
