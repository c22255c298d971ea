"""Who runs in the next step: continuous batching, chunked prefill, preemption. No torch, no clock.

The protocol: `add` requests; `plan` a step and launch it; when its tokens are known, `finish_step`.
A plan may be made while the step before is in flight: a decode needs only the length of its
sequence, which is known without the token. `plan` decides, in this order:

  1. one token for each running sequence that decodes, by priority and age; where no page is left,
     the youngest is preempted: swapped out, or computed again later
  2. the forced tokens of running sequences: known, to be computed in one go
  3. prompts, as far as the step's budget goes: those that have begun, then, if nobody was
     preempted, those that wait, as long as slots and pages last

Beside decodes the budget is a chunk (chunk_policy.py), so that no token waits long for a
neighbour's prompt. A step's prompt blocks are found by the plans after it, before it is done, and a
sequence that finished is freed at once although a step in flight may still write for it: steps run
in the order of their launch.

For a pipeline of several stages there are as many running sets, of disjoint rows and slots, over
one queue and one page pool. They are planned in turns: while a step of one is in flight, those of
the others are planned, launched and finished. What is preempted is the youngest of all.
Invariant: `check_integrity()`; with no live request `check_empty()`.
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

PUBLISHED_BLOCKS = 16  # of an answer at a time, and the rest at its end
SAVED_BLOCKS = 4  # of an answer, between snapshots of states: a copy costs a decode's traffic


class Scheduler:
    """Owns every live sequence. `max_num_seqs` slots, numbered from 1."""

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
        """`totals`: those of a scheduler that this one replaces, to count on from.
        `swap_cost`: None swaps whatever can be swapped, in mode "auto".
        `num_sets`: of running sequences, at most; each has a slot at least.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({max_num_seqs}): each running sequence takes a token per step"
            )
        self.blocks = blocks
        self.waiting = WaitingQueue(self._key)
        self._set_size = -(-max_num_seqs // num_sets)
        starts = range(1, max_num_seqs + 1, self._set_size)
        ends = [*starts[1:], max_num_seqs + 1]
        self.sets = [RunningSet(range(*each), self._key) for each in zip(starts, ends, strict=True)]
        self._turn = 0
        self.running = self.sets[0]  # the set whose turn it is, or was
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
        self._unpublished: tuple[PrefillRow, ...] = ()  # of the last plan

    # --- requests ----------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def set_of(self, seq: Sequence) -> RunningSet:
        """Whose member a running sequence is."""
        return self.sets[(seq.slot - 1) // self._set_size]

    def add(self, request: Request) -> None:
        """Queue a request. With n > 1 its first sequence computes the prompt for all."""
        assert request.request_id not in self._requests, f"request {request.request_id} twice"
        self._requests[request.request_id] = request
        first, *siblings = request.sequences
        if siblings:
            self.waiting.hold_back(siblings)
        self.waiting.add(first)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """End a request at any point of its life; None where it is not live."""
        request = self._requests.get(request_id)
        if request is not None:
            for seq in request.sequences:
                if seq.status is not SequenceStatus.FINISHED:
                    self.finish(seq, reason)
        return request

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence; its slot and pages are free at once."""
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
        """The next step, its sequences advanced as if it were done; None where there is nothing to
        do for the set whose turn it is."""
        self.publish_planned()
        if len(self.sets) > 1:
            self._take_turns()
        draft = StepDraft(self._max_num_batched_tokens)
        if not self.running.is_idle:  # a first prompt waits for nothing that is not its own
            self._plan_decodes(draft)
        self._prefills[self._turn].plan(draft)
        if draft.empty:
            return None
        self._next_step_id += 1
        plan = draft.finish(self._next_step_id)
        self._unpublished = plan.prefills
        return plan

    def _take_turns(self) -> None:
        """The next set plans. It has no more than its share of all, so that the sets are equal."""
        self._turn = (self._turn + 1) % len(self.sets)
        self.running = self.sets[self._turn]
        num_live = sum(len(each.seqs) for each in self.sets) + len(self.waiting)
        self.running.fair_share = -(-num_live // len(self.sets))

    def publish_planned(self) -> None:
        """Have the next plans find what the last one computes of prompts."""
        if self.blocks.states is not None:
            self.blocks.states.publish_written()
        rows, self._unpublished = self._unpublished, ()
        for row in rows:
            if row.seq.status is SequenceStatus.RUNNING:  # who ends is published then
                self.blocks.publish(row.seq)

    def _plan_decodes(self, draft: StepDraft) -> None:
        """One token of each that decodes; the youngest are preempted while pages are short."""
        blocks, running, batch = self.blocks, self.running, self.running.next_batch()
        # A page is full, or (right after a fork) shared: the rest of the rows need no look.
        seqs = batch.seqs if running.has_forks else batch.at_block(blocks.block_size, 0)
        # Of a prompt that goes on, what its windows leave behind is exchanged for what comes next.
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
        """Pages for the next tokens of `seq`, or its own preemption where it is the youngest.

        All or none: what was taken in a step cannot be swapped out by the same step.
        """
        blocks, end = self.blocks, max(seq.num_computed + 1, seq.num_prefill)
        left_behind = blocks.trim(seq)
        missing = blocks.missing_blocks(seq, end)
        while blocks.device.num_free < len(missing):
            victim = max((each.seqs[-1] for each in self.sets if each.seqs), key=self._key)
            self._preemption.preempt(victim, self.set_of(victim), draft)
            if victim is seq:
                return
            missing = blocks.missing_blocks(seq, end)  # the victim may have left a shared page
        appends, copies = blocks.reserve(seq, missing)
        draft.page_appends += left_behind + appends
        draft.page_copies += copies

    # --- a step's tokens ---------------------------------------------------------------------

    def finish_step(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take a finished step's tokens. Sequences that are over are finished and freed here.

        Rows of sequences that ended or got forced tokens while the step was in flight are dropped.
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
        """Append tokens that must come, the first of them for the one sample in flight.

        That sample will be dropped; the tokens are computed as a prefill of the next plans. Fewer
        than `token_ids` where the sequence ends by one of them.
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
        """End it where its last token, or its length, says so."""
        request = seq.request
        num_output = len(seq.token_ids) - len(request.prompt_token_ids)
        may_stop = num_output >= request.sampling_params.min_tokens or seq.constraint is not None
        if may_stop and token_id in request.stop_token_ids:
            asked_for = token_id in (request.sampling_params.stop_token_ids or ())
            self.finish(seq, "stop", token_id if asked_for else None)
        elif num_output >= request.max_tokens:
            self.finish(seq, "length")

    # --- books -------------------------------------------------------------------------------

    def _key(self, seq: Sequence) -> tuple[int, int]:
        """Order of service: priority, then age. A preempted sequence keeps its place."""
        return (seq.request.priority if self._by_priority else 0, seq.seq_id)

    def stats(self) -> SchedulerStats:
        """The running totals, with the gauges brought up to date."""
        stats, blocks = self._stats, self.blocks
        stats.num_running = sum(len(each.seqs) for each in self.sets)
        swapped = self.blocks.host.num_used > 0  # spares a walk over a long queue per step
        waiting = self.waiting if swapped else ()
        stats.num_swapped = sum(seq.status is SequenceStatus.SWAPPED for seq in waiting)
        stats.num_waiting = len(self.waiting) - stats.num_swapped
        stats.num_pages, stats.num_used_pages = blocks.device.num_pages, blocks.device.num_used
        stats.num_groups, stats.num_host_pages = blocks.num_groups, blocks.host.num_pages
        stats.num_used_host_pages = blocks.host.num_used
        return stats

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
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
