"""The scheduler: continuous batching, chunked prefill, preemption. No torch, no clock.

Protocol: `add` requests; `plan` a step and launch it; `finish_step` when its tokens are known. A
step may be planned while the one before is in flight, as a decode depends on the length of its
sequence only, which is known without the token. `plan` schedules, in this order:

  1. one token of each decoding sequence, by priority and age. When pages run out, the youngest
     sequence is preempted: swapped out, or recomputed later
  2. forced tokens of running sequences (jump-forward), as a prefill
  3. prompts, within the step's token budget: first those that have begun, then waiting ones, unless
     a sequence was preempted, and as long as there are slots and pages

In steps with decodes the budget is a chunk (chunk_policy.py), so that no stream stalls for another
request's prompt. Steps run in the order of their launch. So the prompt blocks of a launched step
are in the prefix cache for the next plan already, and a finished sequence is freed at once,
although a step in flight may still write to its pages.

With pipeline stages there is one running set per stage, over one queue and one page pool. The sets
have disjoint rows and slots and are planned in turn: while a step of one set is in flight, steps of
the others are planned, launched and finished. Preemption takes the youngest sequence of all sets.
Invariants: `check_integrity()`, and `check_empty()` when no request is live.
"""

from __future__ import annotations

from itertools import repeat

from asyncllm.config import PreemptionMode, SchedulingPolicy
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import UNBOUNDED, ChunkPolicy
from asyncllm.engine.preemption import Preemption
from asyncllm.engine.prefill_planner import PrefillPlanner, StepDraft
from asyncllm.engine.running_set import RunningSet
from asyncllm.engine.stats import SchedulerStats
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.outputs import FinishReason
from asyncllm.step_plan import PrefillRow, StepPlan
from asyncllm.types import Request, Sequence, SequenceStatus, StepResult, SwapCost, TokenUpdate

PUBLISHED_BLOCKS = 16  # an answer's blocks enter the prefix cache so many at a time, and at its end
SAVED_BLOCKS = 4  # between snapshots of an answer's recurrent states; a copy costs as a decode does


class Scheduler:
    """Owns all live sequences. There are `max_num_seqs` slots, numbered from 1."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunk_policy: ChunkPolicy = UNBOUNDED,
        policy: SchedulingPolicy = "fcfs",
        preemption_mode: PreemptionMode = "auto",
        swap_cost: SwapCost | None = None,
        totals: SchedulerStats | None = None,
        num_sets: int = 1,
    ) -> None:
        """totals: the counts of a scheduler that this one replaces, to continue from.
        swap_cost: in mode "auto"; None swaps whenever there is room.
        num_sets: the most running sets; each has at least one slot.
        """
        assert max_num_batched_tokens >= max_num_seqs, "running sequences take a token per step"
        self.blocks = blocks
        self.waiting = WaitingQueue(self._key)
        self._set_size = -(-max_num_seqs // num_sets)
        starts = range(1, max_num_seqs + 1, self._set_size)
        ends = [*starts[1:], max_num_seqs + 1]
        self.sets = [RunningSet(range(*each), self._key) for each in zip(starts, ends, strict=True)]
        self._turn = 0
        self.running = self.sets[0]  # the set that was planned last, or is being planned
        self._requests: dict[str, Request] = {}
        self._by_priority = policy == "priority"
        self._stats = totals or SchedulerStats()
        self._max_num_batched_tokens = max_num_batched_tokens
        limits = chunk_policy, max_num_batched_tokens
        self._prefills = [
            PrefillPlanner(blocks, running, self.waiting, self._stats, *limits)
            for running in self.sets
        ]
        self._preemption = Preemption(blocks, self.waiting, self._stats, preemption_mode, swap_cost)
        self._next_step_id = 0
        self._unpublished: tuple[PrefillRow, ...] = ()  # of the last plan, not in the cache yet

    # --- requests ----------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def set_of(self, seq: Sequence) -> RunningSet:
        """The set that a running sequence belongs to."""
        return self.sets[(seq.slot - 1) // self._set_size]

    def add(self, request: Request) -> None:
        """Queue a request. With n > 1 its first sequence computes the prompt, the others fork."""
        assert request.request_id not in self._requests, f"request {request.request_id} twice"
        self._requests[request.request_id] = request
        first, *siblings = request.sequences
        if siblings:
            self.waiting.hold_back(siblings)
        self.waiting.add(first)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """End a request, queued or running. None if it is not live."""
        request = self._requests.get(request_id)
        if request is not None:
            for seq in request.sequences:
                if seq.status is not SequenceStatus.FINISHED:
                    self.finish(seq, reason)
        return request

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence and free its slot and pages."""
        assert seq.status is not SequenceStatus.FINISHED, f"sequence {seq.seq_id} ended twice"
        if seq.status is SequenceStatus.RUNNING:
            self.set_of(seq).remove(seq)
            self.blocks.publish(seq)
        else:
            self.waiting.remove(seq)
        self.blocks.forget(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.request.finished:
            del self._requests[seq.request.request_id]

    # --- a step's plan ------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; its sequences advance as if it were done. None if there is nothing to do,
        with several sets for the set whose turn it is."""
        self.publish_planned()
        if len(self.sets) > 1:
            self._take_turns()
        draft = StepDraft(self._max_num_batched_tokens)
        if not self.running.is_idle:  # a shortcut on the way to a first token
            self._plan_decodes(draft)
        self._prefills[self._turn].plan(draft)
        if draft.empty:
            return None
        self._next_step_id += 1
        plan = draft.finish(self._next_step_id)
        self._unpublished = plan.prefills
        return plan

    def _take_turns(self) -> None:
        """Switch to the next set. It admits up to its share of all sequences, so that the sets stay
        of equal size."""
        self._turn = (self._turn + 1) % len(self.sets)
        self.running = self.sets[self._turn]
        num_live = sum(len(each.seqs) for each in self.sets) + len(self.waiting)
        self.running.fair_share = -(-num_live // len(self.sets))

    def publish_planned(self) -> None:
        """Put the last plan's prompt blocks into the prefix cache, for the plans from here on."""
        if self.blocks.states is not None:
            self.blocks.states.publish_written()
        rows, self._unpublished = self._unpublished, ()
        for row in rows:
            if row.seq.status is SequenceStatus.RUNNING:  # `finish` has done it for the others
                self.blocks.publish(row.seq)

    def _plan_decodes(self, draft: StepDraft) -> None:
        """One token of each decoding sequence; preempts the youngest ones while pages are short."""
        blocks, running, batch = self.blocks, self.running, self.running.next_batch()
        # Only rows whose page is full need another; right after a fork, those with shared pages
        # too.
        seqs = batch.seqs if running.has_forks else batch.at_block(blocks.block_size, 0)
        # A prefill with windows frees the pages it has passed and takes pages for its next chunk.
        moving = running.prefilling() if blocks.windows else []
        is_short = len(seqs) * blocks.num_groups > blocks.device.num_free
        if running.has_forks or running.forced or moving or is_short:
            for seq in running.in_order([*seqs, *running.forced, *moving]):
                if seq.status is SequenceStatus.RUNNING:
                    self._take_pages(seq, draft)
        else:
            draft.page_appends += blocks.extend(seqs)
        if rewritten := running.take_rewritten():
            slots = {seq.slot for seq in rewritten}
            draft.page_appends = [a for a in draft.page_appends if a.slot not in slots]
            for seq in rewritten:
                draft.init_slot(seq, blocks.pages_of(seq))
        if blocks.states is not None:
            at_end = running.next_batch().at_block(SAVED_BLOCKS * blocks.block_size, 0)
            draft.states.save.extend(blocks.save_decoded(at_end))
        draft.decodes = running.take_batch()
        draft.budget -= len(draft.decodes)

    def _take_pages(self, seq: Sequence, draft: StepDraft) -> None:
        """Reserve pages for the next tokens of `seq`; preempts others for it, or `seq` itself if it
        is the youngest.

        It takes all pages or none, as a step cannot swap out pages that it has just allocated.
        """
        blocks, end = self.blocks, max(seq.num_computed + 1, seq.num_prefill)
        left_behind = blocks.trim(seq)
        missing = blocks.missing_blocks(seq, end)
        while blocks.device.num_free < len(missing):
            victim = max((each.seqs[-1] for each in self.sets if each.seqs), key=self._key)
            self._preemption.preempt(victim, self.set_of(victim), draft)
            if victim is seq:
                return
            missing = blocks.missing_blocks(seq, end)  # shared pages became its own
        appends, copies = blocks.reserve(seq, missing)
        draft.page_appends += left_behind + appends
        draft.page_copies += copies

    # --- a step's tokens ---------------------------------------------------------------------

    def finish_step(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Append a finished step's tokens; sequences that stop are finished and freed.

        Ignores rows of sequences that ended, or jumped forward, while the step was in flight.
        """
        num_published = PUBLISHED_BLOCKS * self.blocks.block_size
        for seq in plan.decodes.at_block(num_published, num_published - 1):
            if seq.status is SequenceStatus.RUNNING:
                self.blocks.publish(seq)
        updates: list[TokenUpdate] = []
        finished = SequenceStatus.FINISHED
        logprobs_of = result.logprobs or repeat(None, len(result.token_ids))
        for update in zip(plan.sampled, result.token_ids, logprobs_of, strict=True):
            seq, token_id, _ = update
            if seq.status is finished:
                continue
            if seq.num_to_drop:
                seq.num_to_drop -= 1
                continue
            seq.num_in_flight -= 1
            token_ids = seq.token_ids
            token_ids.append(token_id)
            if len(token_ids) > seq.num_to_compute or token_id in seq.request.stop_token_ids:
                self._check_stop(seq, token_id)
            updates.append(update)
        return updates

    def jump_forward(self, seq: Sequence, token_ids: list[int]) -> list[TokenUpdate]:
        """Append forced tokens, the first in place of the one sample in flight, which is ignored.

        The next plans compute them as a prefill. Returns fewer than `token_ids` if the sequence
        stops at one of them.
        """
        assert seq.num_in_flight == 1, f"sequence {seq.seq_id}: {seq.num_in_flight} in flight"
        seq.num_in_flight, seq.num_to_drop = 0, seq.num_to_drop + 1
        updates: list[TokenUpdate] = []
        for token_id in token_ids:
            seq.token_ids.append(token_id)
            self._check_stop(seq, token_id)
            updates.append((seq, token_id, None))
            if seq.status is SequenceStatus.FINISHED:
                return updates
        self.set_of(seq).jump_forward(seq)
        return updates

    def _check_stop(self, seq: Sequence, token_id: int) -> None:
        """Finish `seq` if its last token is a stop token, or its length the limit."""
        request = seq.request
        num_output = len(seq.token_ids) - len(request.prompt_token_ids)
        may_stop = num_output >= request.sampling_params.min_tokens or seq.constraint is not None
        if may_stop and token_id in request.stop_token_ids:
            asked_for = token_id in (request.sampling_params.stop_token_ids or ())
            self.finish(seq, "stop", token_id if asked_for else None)
        elif num_output >= request.max_tokens:
            self.finish(seq, "length")

    # --- order, counts, invariants -----------------------------------------------------------

    def _key(self, seq: Sequence) -> tuple[int, int]:
        """Scheduling order: priority, then age. A preempted sequence keeps its place."""
        return (seq.request.priority if self._by_priority else 0, seq.seq_id)

    def stats(self) -> SchedulerStats:
        """The running totals and current gauges."""
        stats, blocks = self._stats, self.blocks
        stats.num_running = sum(len(each.seqs) for each in self.sets)
        swapped = self.blocks.host.num_used > 0  # saves a walk over the queue in most steps
        waiting = self.waiting if swapped else ()
        stats.num_swapped = sum(seq.status is SequenceStatus.SWAPPED for seq in waiting)
        stats.num_waiting = len(self.waiting) - stats.num_swapped
        stats.num_pages, stats.num_used_pages = blocks.device.num_pages, blocks.device.num_used
        stats.num_groups, stats.num_host_pages = blocks.num_groups, blocks.host.num_pages
        stats.num_used_host_pages = blocks.host.num_used
        return stats

    def check_integrity(self) -> None:
        """Assert the invariants that hold between any two calls."""
        self.blocks.check_integrity()
        for each in self.sets:
            each.check_integrity()
        self.waiting.check_integrity()
        live = {id(s) for r in self._requests.values() for s in r.sequences
                if s.status is not SequenceStatus.FINISHED}  # fmt: skip
        running = [seq for each in self.sets for seq in each.seqs]
        listed = [id(s) for s in (*running, *self.waiting, *self.waiting.held_back())]
        assert len(listed) == len(live) and set(listed) == live, (
            "a live sequence is lost or doubled"
        )

    def check_empty(self) -> None:
        """Assert that nothing is left of any request."""
        self.check_integrity()
        assert not self._requests, "requests are left"
        assert self.blocks.device.num_used == 0 and self.blocks.host.num_used == 0, "pages are left"
        self.blocks.check_empty()
