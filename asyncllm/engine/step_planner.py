"""What the next step does: continuous batching, chunked prefill, preemption. No torch, no clock.

A plan may be made while the step before is still in flight: a decode needs only the length of its
sequence, which is known without the token. What `plan` decides, in this order:

  1. one token for each running sequence that decodes, by priority and age; where no page is left,
     the youngest is preempted (preemption.py)
  2. tokens that running sequences have jumped to: known, to be computed in one go
  3. prompts, as far as the step's budget goes: those that have begun, then, if nobody was
     preempted, those that wait, as long as slots and pages last

Beside decodes the budget is a chunk (chunk_policy.py), so that no token waits long for a
neighbour's prompt. What a step computes of a prompt is found by the plans after it, before it is
done: steps run in the order of their launch.
"""

from __future__ import annotations

from asyncllm.engine.block_manager import BlockManager, PrefixMatch
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.preemption import Preemption
from asyncllm.engine.running_set import RunningSet, may_decode
from asyncllm.engine.stats import SchedulerStats
from asyncllm.engine.step_draft import StepDraft
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.step_plan import PrefillRow, SlotInit, StepPlan
from asyncllm.types import Sequence, SequenceStatus

FREE_PAGES_WATERMARK = 0.01  # share of pages kept free at admission, so that decodes can grow


class StepPlanner:
    """Moves sequences between `waiting` and `running`, and counts what it does in `stats`."""

    def __init__(
        self,
        blocks: BlockManager,
        waiting: WaitingQueue,
        running: RunningSet,
        stats: SchedulerStats,
        *,
        max_num_batched_tokens: int,
        chunk_policy: ChunkPolicy,
        preemption: Preemption,
    ) -> None:
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._stats = stats
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunk_policy = chunk_policy
        self._preemption = preemption
        self._next_step_id = 0
        self._unpublished: tuple[PrefillRow, ...] = ()  # of the last plan
        self._watermark = int(blocks.device.num_pages * FREE_PAGES_WATERMARK)

    def plan(self) -> StepPlan | None:
        """The next step, its sequences advanced as if it were done; None where there is nothing."""
        self.publish_planned()
        draft = StepDraft(self._max_num_batched_tokens)
        if not self._running.is_idle:  # a first prompt waits for nothing that is not its own
            self._plan_decodes(draft)
            self._plan_jumps(draft)
        self._plan_prefills(draft)
        if draft.empty:
            return None
        self._next_step_id += 1
        plan = draft.finish(self._next_step_id)
        self._unpublished = plan.prefills
        return plan

    def publish_planned(self) -> None:
        """Have the next plans find what the last one computes of prompts."""
        rows, self._unpublished = self._unpublished, ()
        for row in rows:
            if row.seq.status is SequenceStatus.RUNNING:  # who ends is published then
                self._blocks.publish(row.seq)

    def _plan_decodes(self, draft: StepDraft) -> None:
        """One token of each that decodes; the youngest are preempted while pages are short."""
        blocks, running, batch = self._blocks, self._running, self._running.next_batch()
        # A page is full, or (right after a fork) shared: the rest of the rows need no look.
        seqs = batch.seqs if running.forked else batch.at_block_start(blocks.block_size)
        if running.forked or running.jumped or blocks.device.num_free < len(seqs):
            for seq in running.in_order([*seqs, *running.jumped]):
                if seq.status is SequenceStatus.RUNNING:
                    self._take_pages(seq, self._next_positions(seq), draft)
        else:
            draft.page_appends += blocks.extend(seqs)
        self._rewrite_slots(draft)
        draft.decodes = self._running.take_batch()
        if self._running.forked:
            self._running.forked.difference_update(draft.decodes.seqs)

    def _rewrite_slots(self, draft: StepDraft) -> None:
        """Tell the device of those that go on with other tokens than it knows."""
        if self._running.rewritten:
            rewritten = self._running.in_order([*self._running.rewritten])
            self._running.rewritten.clear()
            slots = {seq.slot for seq in rewritten}
            draft.page_appends = [a for a in draft.page_appends if a.slot not in slots]
            for seq in rewritten:
                self._init_slot(seq, draft)

    def _next_positions(self, seq: Sequence) -> list[int]:
        """Of what comes next, the first and whichever begin a block."""
        first, size = seq.num_computed, self._blocks.block_size
        if seq.num_prefill <= first + 1:
            return [first]
        return [first, *range((first // size + 1) * size, seq.num_prefill, size)]

    def _take_pages(self, seq: Sequence, positions: list[int], draft: StepDraft) -> None:
        """Pages for these positions of `seq`, or its own preemption where it is the youngest.

        All or none: what was taken in a step cannot be swapped out by the same step.
        """
        blocks = self._blocks
        needing = [position for position in positions if blocks.needs_page(seq, position)]
        while blocks.device.num_free < len(needing):
            victim = self._running.seqs[-1]
            self._preemption.preempt(victim, draft)
            if victim is seq:
                return
            # The victim may have shared the page and left it.
            needing = [position for position in needing if blocks.needs_page(seq, position)]
        for position in needing:
            append, copy = blocks.reserve(seq, position)
            draft.page_appends.append(append)
            if copy is not None:
                draft.page_copies.append(copy)

    def _plan_jumps(self, draft: StepDraft) -> None:
        """In place of decodes, so not within the chunk; what does not fit goes on as a prompt."""
        draft.budget -= len(draft.decodes)
        for seq in self._running.take_jumped():
            if draft.budget > 0:
                self._prefill_chunk(seq, draft)

    def _plan_prefills(self, draft: StepDraft) -> None:
        started = self._running.prefilling()
        if not started and not self._waiting:
            return
        begun = [seq.num_prefill - seq.num_computed for seq in started]
        num_beside = self._max_num_batched_tokens - draft.budget  # decodes and jumps
        room = self._chunk_policy.room(num_beside, self._num_startable_tokens(), begun)
        draft.to_end = min(room.to_end, max(0, draft.budget - room.num_tokens))
        draft.budget, draft.shared = min(draft.budget, room.num_tokens), room.shared
        if started and not draft.preempted:
            self._admit_short(draft, started[0])
        for seq in started:
            if draft.budget > 0:
                self._prefill_chunk(seq, draft)
        if not draft.preempted:
            self._admit_waiting(draft)

    def _num_startable_tokens(self) -> int:
        """Prompt tokens that wait only for their turn, not for a slot or for pages."""
        blocks, waiting = self._blocks, self._waiting
        num_startable = min(len(waiting), self._running.num_free_slots)
        num_tokens = waiting.num_prompt_tokens * num_startable // max(1, len(waiting))
        return min(num_tokens, blocks.device.num_free * blocks.block_size)

    def _prefill_chunk(self, seq: Sequence, draft: StepDraft) -> None:
        """Plan as much of a prefill as the budget allows; the last chunk samples (and forks)."""
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
                block_ids=self._blocks.pages_of(seq)[: self._blocks.num_blocks(end)],
                samples=samples,
            )
        )
        draft.take(end - start)
        seq.num_computed = end
        for sampled in samples:
            self._running.join(sampled)
            sampled.num_computed = end
            sampled.num_in_flight += 1

    def _fork(self, seq: Sequence, draft: StepDraft) -> list[Sequence]:
        """Siblings that share this prompt from here on; those without a slot queue on their own."""
        siblings = self._waiting.take_siblings(seq)
        forks = siblings[: self._running.num_free_slots]
        for child in forks:
            self._blocks.fork(seq, child)
            child.num_prefill = child.num_computed = seq.num_prefill
            child.num_cached_tokens = seq.num_cached_tokens
            self._take_slot(child, draft)
            self._running.forked |= {seq, child}
        for child in siblings[len(forks) :]:
            self._waiting.add(child)
        return forks

    # --- admission ---------------------------------------------------------------------------

    def _admit_short(self, draft: StepDraft, oldest: Sequence) -> None:
        """Where a long prompt takes many steps, half of each is for prompts that it finishes."""
        kept = draft.budget - draft.budget // 2
        if oldest.num_prefill - oldest.num_computed > draft.budget:
            draft.budget -= kept
            self._admit_waiting(draft, to_the_end=True)
            draft.budget = max(draft.budget, 0) + kept  # what they share is no debt of the oldest's

    def _admit_waiting(self, draft: StepDraft, to_the_end: bool = False) -> None:
        """From the head of the queue. `to_the_end`: only prefills that end in this step."""
        while self._waiting and draft.budget > 0 and self._running.num_free_slots:
            seq = self._waiting.head
            if seq.num_in_flight > 0:
                return  # preempted a moment ago: its last token is known after the step in flight
            if seq.status is SequenceStatus.SWAPPED:
                admitted = self._swap_in(seq, draft)
            else:
                admitted = self._admit(seq, draft, to_the_end)
            if not admitted:
                return
            self._waiting.remove(seq)

    def _admit(self, seq: Sequence, draft: StepDraft, to_the_end: bool) -> bool:
        """Admit a sequence with nothing computed, if its known tokens fit; False where not."""
        # Logprobs of a position need its hidden state, which no page holds.
        match = PrefixMatch(()) if seq.owes_prompt_logprobs else self._blocks.match_prefix(seq)
        num_left = len(seq.token_ids) - len(match) * self._blocks.block_size
        if to_the_end and num_left > draft.budget:
            return False
        if not self._fits(self._blocks.num_pages_to_admit(seq, match)):
            return False
        draft.swap_in += self._blocks.admit(seq, match)
        num_cached = len(match) * self._blocks.block_size
        if seq.num_prefill == 0 and seq.num_output_tokens == 0:  # its first admission
            seq.num_cached_tokens = num_cached
            self._stats.prefix_cache_queries += seq.num_prompt_tokens
            self._stats.prefix_cache_hits += num_cached
        seq.num_computed = num_cached
        seq.num_prefill = len(seq.token_ids)
        self._take_slot(seq, draft)
        self._prefill_chunk(seq, draft)
        return True

    def _swap_in(self, seq: Sequence, draft: StepDraft) -> bool:
        """Bring a swapped sequence back, if it fits with its next token; False where not."""
        if not self._fits(self._blocks.num_pages_to_swap_in(seq)):
            return False
        draft.swap_in += self._blocks.swap_in(seq)
        self._take_slot(seq, draft)
        if seq.num_computed < seq.num_prefill:
            self._prefill_chunk(seq, draft)
        elif may_decode(seq):
            self._take_pages(seq, [seq.num_computed], draft)
            draft.decodes = draft.decodes.plus([seq])
            draft.budget -= 1
            seq.num_computed += 1
            seq.num_in_flight += 1
        return True

    def _fits(self, num_pages: int) -> bool:
        watermark = self._watermark if self._running.seqs else 0
        return self._blocks.device.num_free - num_pages >= watermark

    def _take_slot(self, seq: Sequence, draft: StepDraft) -> None:
        self._running.add(seq)
        self._init_slot(seq, draft)

    def _init_slot(self, seq: Sequence, draft: StepDraft) -> None:
        pages = self._blocks.pages_of(seq)
        draft.slot_inits.append(
            SlotInit(seq, seq.slot, pages, seq.num_computed, list(seq.token_ids))
        )
