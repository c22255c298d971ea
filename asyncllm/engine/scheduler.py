"""Who runs in the next step: continuous batching, chunked prefill, preemption. No torch, no clock.

The protocol: `add` requests; `plan` a step and launch it; when its tokens are known, `finish_step`.
A plan may be made while the step before is still in flight: a decode needs only the length of its
sequence, which is known without the token. What `plan` decides, in this order:

  1. running sequences, by priority and age: one token for each that decodes, a chunk for each
     prefill; where no page is left, the youngest is preempted (swapped or recomputed)
  2. if none was preempted, waiting sequences as long as tokens, slots and pages last

Prompts get what is left of `max_num_batched_tokens`, and beside decodes at most `chunk_tokens`, so
that no token waits long for a neighbour's prompt. What a step computes of a prompt is found by
the plans after it, before it is done: steps run in the order of their launch.

A sequence that finished is freed at once although a step in flight may still write for it: steps
run in the order of their launch, so no later step sees those writes.
Invariant: `check_integrity()`; with no live request `check_empty()`.
"""

from __future__ import annotations

from bisect import insort

from asyncllm.config import PreemptionMode, SchedulingPolicy
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.running_set import RunningSet, may_decode
from asyncllm.engine.stats import SchedulerStats
from asyncllm.engine.step_draft import StepDraft
from asyncllm.types import (
    FinishReason,
    PrefillRow,
    Request,
    Sequence,
    SequenceStatus,
    SlotInit,
    StepPlan,
    StepResult,
    SwapCost,
    TokenUpdate,
)

FREE_PAGES_WATERMARK = 0.01  # share of pages kept free at admission, so that decodes can grow


class Scheduler:
    """Owns every live sequence. `max_num_seqs` slots, numbered from 1."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunk_tokens: int | None = None,
        policy: SchedulingPolicy = "fcfs",
        preemption_mode: PreemptionMode = "auto",
        swap_cost: SwapCost | None = None,
        totals: SchedulerStats | None = None,
    ) -> None:
        """`chunk_tokens`: most prompt tokens of a step that also decodes; None: no such bound.

        `totals`: those of a scheduler that this one replaces, to count on from.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({max_num_seqs}): each running sequence takes a token per step"
            )
        self.blocks = blocks
        self.waiting: list[Sequence] = []  # WAITING or SWAPPED, in order of _key
        self.running = RunningSet(max_num_seqs, self._key)
        self._requests: dict[str, Request] = {}
        self._unforked: dict[str, list[Sequence]] = {}  # siblings that wait for a prompt's prefill
        self._forked: set[Sequence] = set()  # running ones that may share the page they write to
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunk_tokens = chunk_tokens or max_num_batched_tokens
        self._by_priority = policy == "priority"
        self._preemption_mode = preemption_mode
        self._swap_cost = swap_cost
        self._next_step_id = 0
        self._watermark = int(blocks.device.num_pages * FREE_PAGES_WATERMARK)
        self._stats = totals or SchedulerStats()

    # --- requests ----------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def requests(self) -> list[Request]:
        """The live requests, oldest first; a copy."""
        return list(self._requests.values())

    def has_request(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request. With n > 1 its first sequence computes the prompt for all."""
        assert request.request_id not in self._requests, f"request {request.request_id} twice"
        self._requests[request.request_id] = request
        first, *siblings = request.sequences
        if siblings:
            self._unforked[request.request_id] = siblings
        self._enqueue(first)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
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
        siblings = self._unforked.get(seq.request.request_id, [])
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq)
        elif seq in siblings:
            siblings.remove(seq)
        else:
            self.waiting.remove(seq)
        self.blocks.forget(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.request.finished:
            del self._requests[seq.request.request_id]
            self._unforked.pop(seq.request.request_id, None)

    # --- planning ----------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, its sequences advanced as if it were done; None where there is nothing."""
        draft = StepDraft()
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if draft.empty:
            return None
        for row in draft.prefills:
            self.blocks.publish(row.seq, row.seq.num_computed)
        self._next_step_id += 1
        return draft.finish(self._next_step_id)

    def _plan_decodes(self, draft: StepDraft) -> None:
        """One token of each that decodes; the youngest are preempted while pages are short."""
        blocks, batch = self.blocks, self.running.next_batch()
        # A page is full, or (right after a fork) shared: the rest of the rows need no look.
        seqs = batch.seqs if self._forked else batch.at_block_start(blocks.block_size)
        for seq in seqs:
            if seq.status is SequenceStatus.RUNNING and blocks.needs_page(seq, seq.num_computed):
                self._take_page(seq, draft)
        draft.decodes = self.running.take_batch()
        self._forked.difference_update(draft.decodes.seqs)

    def _take_page(self, seq: Sequence, draft: StepDraft) -> None:
        """A page for the next token of `seq`, or its own preemption where it is the youngest."""
        blocks, position = self.blocks, seq.num_computed
        while blocks.device.num_free == 0:
            victim = self.running.seqs[-1]
            self._preempt(victim, draft)
            if victim is seq or not blocks.needs_page(seq, position):
                return  # or the victim shared the page and left it
        append, copy = blocks.reserve(seq, position)
        draft.page_appends.append(append)
        if copy is not None:
            draft.page_copies.append(copy)

    def _plan_prefills(self, draft: StepDraft) -> None:
        num_decodes = len(draft.decodes)
        draft.budget = self._max_num_batched_tokens - num_decodes
        if num_decodes:
            draft.budget = min(draft.budget, self._chunk_tokens)
        started = self.running.prefilling()
        if started and not draft.preempted:
            self._admit_short(draft, started[0])
        for seq in started:
            if draft.budget > 0:
                self._prefill_chunk(seq, draft)
        if not draft.preempted:
            self._admit_waiting(draft)

    def _prefill_chunk(self, seq: Sequence, draft: StepDraft) -> None:
        """Plan as much of a prefill as the budget allows; the last chunk samples (and forks)."""
        start = seq.num_computed
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
                block_ids=self.blocks.pages_of(seq)[: self.blocks.num_blocks(end)],
                samples=samples,
            )
        )
        draft.budget -= end - start
        if samples:
            self.running.set_changed()
        seq.num_computed = end
        for sampled in samples:
            sampled.num_computed = end
            sampled.num_in_flight += 1

    def _fork(self, seq: Sequence, draft: StepDraft) -> list[Sequence]:
        """Siblings that share this prompt from here on; those without a slot queue on their own."""
        siblings = self._unforked.pop(seq.request.request_id, [])
        forks = siblings[: self.running.num_free_slots]
        for child in forks:
            self.blocks.fork(seq, child)
            child.num_prefill = child.num_computed = seq.num_prefill
            child.num_cached_tokens = seq.num_cached_tokens
            self._take_slot(child, draft)
            self._forked |= {seq, child}
        for child in siblings[len(forks) :]:
            self._enqueue(child)
        return forks

    # --- admission ---------------------------------------------------------------------------

    def _admit_short(self, draft: StepDraft, oldest: Sequence) -> None:
        """Where a long prompt takes many steps, half of each is for prompts that it finishes."""
        kept = draft.budget - draft.budget // 2
        if oldest.num_prefill - oldest.num_computed > draft.budget:
            draft.budget -= kept
            self._admit_waiting(draft, to_the_end=True)
            draft.budget += kept

    def _admit_waiting(self, draft: StepDraft, to_the_end: bool = False) -> None:
        """From the head of the queue. `to_the_end`: only prefills that end in this step."""
        while self.waiting and draft.budget > 0 and self.running.num_free_slots:
            seq = self.waiting[0]
            if seq.num_in_flight > 0:
                return  # preempted a moment ago: its last token is known after the step in flight
            if seq.status is SequenceStatus.SWAPPED:
                admitted = self._swap_in(seq, draft)
            else:
                admitted = self._admit(seq, draft, to_the_end)
            if not admitted:
                return
            del self.waiting[0]

    def _admit(self, seq: Sequence, draft: StepDraft, to_the_end: bool) -> bool:
        """Admit a sequence with nothing computed, if its known tokens fit; False where not."""
        match = self.blocks.match_prefix(seq)
        if seq.request.sampling_params.prompt_logprobs is not None:
            match = type(match)(())  # every prompt position must go through the model
        num_left = len(seq.token_ids) - len(match) * self.blocks.block_size
        if to_the_end and num_left > draft.budget:
            return False
        if not self._fits(self.blocks.num_pages_to_admit(seq, match)):
            return False
        draft.swap_in += self.blocks.admit(seq, match)
        num_cached = len(match) * self.blocks.block_size
        if seq.num_prefill == 0:  # its first admission
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
        if not self._fits(self.blocks.num_pages_to_swap_in(seq)):
            return False
        draft.swap_in += self.blocks.swap_in(seq)
        self._take_slot(seq, draft)
        if seq.num_computed < seq.num_prefill:
            self._prefill_chunk(seq, draft)
        elif may_decode(seq):
            if self.blocks.needs_page(seq, seq.num_computed):
                self._take_page(seq, draft)
            draft.decodes = draft.decodes.plus(seq, seq.num_computed)
            draft.budget -= 1
            seq.num_computed += 1
            seq.num_in_flight += 1
        return True

    def _fits(self, num_pages: int) -> bool:
        watermark = self._watermark if self.running.seqs else 0
        return self.blocks.device.num_free - num_pages >= watermark

    def _take_slot(self, seq: Sequence, draft: StepDraft) -> None:
        self.running.add(seq)
        pages = self.blocks.pages_of(seq)
        draft.slot_inits.append(
            SlotInit(seq, seq.slot, pages, seq.num_computed, list(seq.token_ids))
        )

    # --- preemption --------------------------------------------------------------------------

    def _preempt(self, seq: Sequence, draft: StepDraft) -> None:
        """Take slot and pages from a running sequence and put it back into the queue."""
        draft.preempted = True
        seq.request.metrics.num_preemptions += 1
        self._leave(seq)
        if self._should_swap(seq):
            draft.swap_out += self.blocks.swap_out(seq)
            seq.status = SequenceStatus.SWAPPED
            self._stats.num_preemptions_swap += 1
        else:
            self.blocks.free(seq)
            seq.num_computed = 0
            seq.status = SequenceStatus.WAITING
            self._stats.num_preemptions_recompute += 1
        self._enqueue(seq)

    def _should_swap(self, seq: Sequence) -> bool:
        if self._preemption_mode == "recompute" or not self.blocks.can_swap_out(seq):
            return False
        if self._preemption_mode == "swap" or self._swap_cost is None:
            return True
        cost = self._swap_cost
        num_pages = self.blocks.num_blocks(seq.num_computed)
        recompute = self.blocks.num_uncached_tokens(seq) * cost.seconds_per_token
        return 2 * num_pages * cost.seconds_per_page < recompute

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._forked.discard(seq)

    # --- results -----------------------------------------------------------------------------

    def finish_step(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take a finished step's tokens. Sequences that are over are finished and freed here.

        Rows of sequences that ended while the step was in flight are dropped.
        """
        for seq, num_complete in plan.decodes.full_blocks(self.blocks.block_size):
            if seq.status is SequenceStatus.RUNNING:
                self.blocks.publish(seq, num_complete)
        updates: list[TokenUpdate] = []
        finished, all_logprobs = (
            SequenceStatus.FINISHED,
            result.logprobs or [None] * len(plan.sampled),
        )
        for seq, token_id, logprobs in zip(
            plan.sampled, result.token_ids, all_logprobs, strict=True
        ):
            if seq.status is not finished:
                seq.num_in_flight -= 1
                seq.token_ids.append(token_id)
                self._check_stop(seq, token_id)
                updates.append(TokenUpdate(seq, token_id, logprobs))
        return updates

    def _check_stop(self, seq: Sequence, token_id: int) -> None:
        request = seq.request
        num_output = len(seq.token_ids) - len(request.prompt_token_ids)
        if token_id in request.stop_token_ids and num_output >= request.sampling_params.min_tokens:
            is_eos = token_id not in (request.sampling_params.stop_token_ids or ())
            self.finish(seq, FinishReason.STOP, None if is_eos else token_id)
        elif num_output >= request.max_tokens:
            self.finish(seq, FinishReason.LENGTH)

    # --- books -------------------------------------------------------------------------------

    def _key(self, seq: Sequence) -> tuple[int, int]:
        """Order of service: priority, then age. A preempted sequence keeps its place."""
        return (seq.request.priority if self._by_priority else 0, seq.seq_id)

    def _enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=self._key)

    def stats(self) -> SchedulerStats:
        """The running totals, with the gauges brought up to date."""
        stats, blocks = self._stats, self.blocks
        stats.num_running = len(self.running.seqs)
        swapped = self.blocks.host.num_used > 0  # spares a walk over a long queue per step
        waiting = self.waiting if swapped else []
        stats.num_swapped = sum(seq.status is SequenceStatus.SWAPPED for seq in waiting)
        stats.num_waiting = len(self.waiting) - stats.num_swapped
        stats.num_pages, stats.num_used_pages = blocks.device.num_pages, blocks.device.num_used
        stats.num_host_pages = blocks.host.num_pages
        stats.num_used_host_pages = blocks.host.num_used
        return stats

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self.blocks.check_integrity()
        self.running.check_integrity()
        for queue in (self.running.seqs, self.waiting):
            keys = [self._key(seq) for seq in queue]
            assert keys == sorted(keys), "a queue is out of order"
        live = {id(s) for r in self._requests.values() for s in r.sequences
                if s.status is not SequenceStatus.FINISHED}  # fmt: skip
        unforked = [seq for group in self._unforked.values() for seq in group]
        listed = [id(seq) for seq in (*self.running.seqs, *self.waiting, *unforked)]
        assert len(listed) == len(live) and set(listed) == live, (
            "a live sequence is lost or doubled"
        )

    def check_empty(self) -> None:
        """Assert that nothing is left of any request."""
        self.check_integrity()
        assert not self._requests and not self._unforked, "requests are left"
        assert not self._forked, "forks are left"
        assert self.blocks.device.num_used == 0 and self.blocks.host.num_used == 0, "pages are left"
        self.blocks.check_empty()
