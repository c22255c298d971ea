"""Plans the prompts of a step: which continue, how many tokens of each, and which are admitted.

A `StepDraft` is a step that is being planned. It comes here with its decodes, and gets prompts as
far as its token budget, the chunk policy, slots and pages allow.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.running_set import RunningSet
from asyncllm.engine.state_pool import StatePool
from asyncllm.engine.stats import SchedulerStats
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.step_plan import (
    NO_DECODES,
    NO_STATE_MOVES,
    DecodeBatch,
    PageAppend,
    PrefillRow,
    SlotInit,
    StateMoves,
    StepPlan,
)
from asyncllm.types import Sequence, SequenceStatus

FREE_PAGES_WATERMARK = 0.01  # share of pages that admission leaves free for running sequences


class _StateLists(NamedTuple):
    """The lists that become `StateMoves`."""

    swap_out: list[tuple[int, int]]
    save: list[tuple[int, int]]
    restore: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    fork: list[tuple[int, int]]


@dataclass(slots=True)
class StepDraft:
    """budget: tokens that the step may still take. The lists become the plan's fields.

    to_end, shared: as of `PrefillBudget`; `take` reduces `shared`.
    """

    budget: int = 0
    to_end: int = 0
    shared: int = sys.maxsize
    preempted: bool = False  # a sequence was: then none is admitted
    decodes: DecodeBatch = NO_DECODES
    prefills: list[PrefillRow] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    slot_inits: list[SlotInit] = field(default_factory=list)
    page_appends: list[PageAppend] = field(default_factory=list)
    states: _StateLists = field(default_factory=lambda: _StateLists([], [], [], [], []))

    @property
    def empty(self) -> bool:
        return not (self.decodes or self.prefills or self.swap_out or self.states.swap_out)

    def init_slot(self, seq: Sequence, block_ids: list[list[int]]) -> None:
        """Write the device state of `seq`, which owns a slot and these pages."""
        self.slot_inits.append(
            SlotInit(seq, seq.slot, block_ids, seq.num_computed, list(seq.token_ids))
        )

    def take(self, num_tokens: int) -> None:
        """Charge tokens of a prompt to the budget."""
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
            states=StateMoves(*map(tuple, self.states)) if any(self.states) else NO_STATE_MOVES,
        )


class PrefillPlanner:
    """Uses the scheduler's pages, slots and queue; counts prefix cache hits in `stats`."""

    def __init__(
        self,
        blocks: BlockManager,
        running: RunningSet,
        waiting: WaitingQueue,
        stats: SchedulerStats,
        chunk_policy: ChunkPolicy,
        max_num_batched_tokens: int,
    ) -> None:
        self._blocks = blocks
        self._running = running
        self._waiting = waiting
        self._stats = stats
        self._chunk_policy = chunk_policy
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark = int(blocks.device.num_pages * FREE_PAGES_WATERMARK)

    def plan(self, draft: StepDraft) -> None:
        """Add forced tokens and begun prompts, and waiting prompts unless there was a
        preemption."""
        if self._running.forced:
            self._plan_forced(draft)
        started = self._running.prefilling()
        if not started and not self._waiting:
            return
        begun = [seq.num_prefill - seq.num_computed for seq in started]
        num_beside = self._max_num_batched_tokens - draft.budget  # decodes and forced tokens
        limit = self._chunk_policy.budget(num_beside, self._num_startable_tokens(), begun)
        draft.to_end = min(limit.to_end, max(0, draft.budget - limit.num_tokens))
        draft.budget, draft.shared = min(draft.budget, limit.num_tokens), limit.shared
        if started and not draft.preempted:
            self._admit_short(draft, started[0])
        for seq in started:
            if draft.budget > 0:
                self._prefill_chunk(seq, draft)
        if not draft.preempted:
            self._admit_waiting(draft)

    def _plan_forced(self, draft: StepDraft) -> None:
        """Add forced tokens. They replace decodes, so the chunk does not limit them; what exceeds
        the step's budget continues as a prompt does."""
        for seq in self._running.take_forced():
            if draft.budget > 0:
                self._prefill_chunk(seq, draft)

    def _num_startable_tokens(self) -> int:
        """Waiting prompt tokens for which there are slots and pages."""
        blocks, waiting = self._blocks, self._waiting
        num_startable = min(len(waiting), self._running.num_admissible)
        num_tokens = waiting.num_prompt_tokens * num_startable // max(1, len(waiting))
        num_free_blocks = blocks.device.num_free // blocks.num_groups
        return min(num_tokens, num_free_blocks * blocks.block_size)

    def _prefill_chunk(self, seq: Sequence, draft: StepDraft) -> None:
        """Add a chunk of a prefill, as large as the budget allows. The last chunk samples, and
        forks the siblings."""
        start, left = seq.num_computed, seq.num_prefill - seq.num_computed
        if not draft.prefills and draft.budget < left <= draft.budget + draft.to_end:
            draft.budget = left
        end = min(seq.num_prefill, start + draft.budget)
        samples: tuple[Sequence, ...] = ()
        if end == seq.num_prefill:
            samples = (seq, *self._fork(seq, draft))
        draft.prefills.append(
            PrefillRow(
                seq=seq,
                slot=seq.slot,
                start=start,
                token_ids=seq.token_ids[start:end],
                block_ids=self._blocks.pages_of(seq, self._blocks.num_blocks(end)),
                samples=samples,
                saves=self._blocks.save_states(seq, start, end),
            )
        )
        draft.take(end - start)
        seq.num_computed = end
        for sampled in samples:
            self._running.join(sampled)
            sampled.num_computed = end
            sampled.num_in_flight += 1

    def _restore_state(self, seq: Sequence, states: StatePool, draft: StepDraft) -> None:
        """Set the recurrent state that an admitted sequence starts from."""
        host_row = states.leave_host(seq.seq_id)
        if host_row is not None:
            draft.states.swap_in.append((host_row, seq.slot))
        else:
            row = states.source(self._blocks.prefixes.hash_at(seq, seq.num_computed))
            draft.states.restore.append((row, seq.slot))

    def _fork(self, seq: Sequence, draft: StepDraft) -> list[Sequence]:
        """The siblings (n > 1) that share this prompt's pages. Those without a slot are queued."""
        siblings = self._waiting.take_siblings(seq)
        forks = siblings[: self._running.num_free_slots]
        for child in forks:
            self._blocks.fork(seq, child)
            child.num_prefill = child.num_computed = seq.num_prefill
            child.num_cached_tokens = seq.num_cached_tokens
            self._take_slot(child, draft)
            if self._blocks.states is not None:
                draft.states.fork.append((seq.slot, child.slot))
            self._running.note_fork(seq, child)
        for child in siblings[len(forks) :]:
            self._waiting.add(child)
        return forks

    # --- admission ---------------------------------------------------------------------------

    def _admit_short(self, draft: StepDraft, oldest: Sequence) -> None:
        """While a long prompt takes many steps, reserve half of each for prompts that fit whole."""
        kept = draft.budget - draft.budget // 2
        if oldest.num_prefill - oldest.num_computed > draft.budget:
            draft.budget -= kept
            self._admit_waiting(draft, to_the_end=True)
            draft.budget = max(draft.budget, 0) + kept  # `shared` does not limit the oldest prompt

    def _admit_waiting(self, draft: StepDraft, to_the_end: bool = False) -> None:
        """Admit from the head of the queue. to_the_end: only prefills that end in this step."""
        while self._waiting and draft.budget > 0 and self._running.num_admissible:
            seq = self._waiting.head
            if seq.num_in_flight > 0:
                return  # just preempted: its last token is known after the step in flight
            if not self._admit(seq, draft, to_the_end):
                return
            self._waiting.remove(seq)

    def _admit(self, seq: Sequence, draft: StepDraft, to_the_end: bool) -> bool:
        """Admit a sequence if there are pages for its known tokens. Whether it was admitted."""
        is_swapped = seq.status is SequenceStatus.SWAPPED
        # Prompt logprobs need hidden states, which the prefix cache does not have.
        looks_up = self._blocks.enable_prefix_caching and not (
            is_swapped or seq.owes_prompt_logprobs
        )
        num_blocks = self._blocks.prefixes.match(seq) if looks_up else 0
        num_cached = num_blocks * self._blocks.block_size
        if to_the_end and not is_swapped and len(seq.token_ids) - num_cached > draft.budget:
            return False
        num_spared = self._watermark if self._running.seqs else 0
        swap_in = self._blocks.admit(seq, num_blocks, num_spared)
        if swap_in is None:
            return False
        draft.swap_in += swap_in
        if not is_swapped:
            if seq.num_prefill == 0 and seq.num_output_tokens == 0:  # its first admission
                seq.num_cached_tokens = num_cached
                self._stats.prefix_cache_queries += seq.num_prompt_tokens
                self._stats.prefix_cache_hits += num_cached
            seq.num_computed, seq.num_prefill = num_cached, len(seq.token_ids)
        self._take_slot(seq, draft)
        if self._blocks.states is not None:
            self._restore_state(seq, self._blocks.states, draft)
        if seq.num_computed < seq.num_prefill:
            self._prefill_chunk(seq, draft)
        else:
            draft.decodes = draft.decodes.plus([seq])
            draft.budget -= 1
            seq.num_computed += 1
            seq.num_in_flight += 1
        return True

    def _take_slot(self, seq: Sequence, draft: StepDraft) -> None:
        self._running.add(seq)
        draft.init_slot(seq, self._blocks.pages_of(seq))
