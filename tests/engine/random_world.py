"""A random small engine with random clients, whose every answer is compared with the oracle's.

Pages are so short that preemption is the rule. Requests come, and are aborted, at random turns of
the event loop. All books are checked after each plan, each finished step and each abort.
`World.seen` counts what happened, so that a test can tell whether it happened at all.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from asyncllm.cache_group import CacheGroup, num_blocks_that_fit
from asyncllm.engine import chunk_policy as policy_module
from asyncllm.engine import prefill_planner as planner_module
from asyncllm.engine import scheduler as scheduler_module
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.constraints import constrain
from asyncllm.engine.pipeline import run_ahead, run_staged, run_synchronous
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.state_pool import StatePool
from asyncllm.step_plan import StepPlan
from asyncllm.types import (
    PADDING_SLOT,
    LaunchedStep,
    Request,
    Sequence,
    SequenceStatus,
    StepResult,
    SwapCost,
    TokenUpdate,
)
from tests.engine.automaton import Automaton
from tests.engine.builders import make_request, scheduled_requests
from tests.engine.fake_device import VOCAB_SIZE, FakeDevice, FakeLaunched
from tests.engine.oracle import Answer, ends_with_stop_string, generate_alone

MAX_LEN = 40  # tokens of prompt and answer
MAX_REQUESTS = 24
WINDOWS: list[tuple[int | None, ...]] = [
    (None,), (None,), (None, None), (3,), (8, None), (None, 2), (1, 6, None),
]  # fmt: skip


class WorldIsDone(Exception):
    """Nothing is left to do in a world."""


@dataclass
class World:
    """A random engine and random clients; the same for the same seed and pipeline."""

    seed: int
    ahead: bool
    seen: Counter[str]
    num_sets: int = 1  # of rows, of a pipeline of stages; each has a step in flight
    num_steps: int = 0
    requests: list[Request] = field(default_factory=list)
    stop_strings: set[str] = field(default_factory=set)  # request ids that have one
    steps_at_add: dict[str, int] = field(default_factory=dict)
    finished_texts: list[tuple[list[int], int]] = field(default_factory=list)  # and prompt lengths
    cut: dict[int, int] = field(default_factory=dict)  # seq_id -> tokens up to its stop string
    followed: dict[str, int] = field(default_factory=dict)  # request -> prompt length before it

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.windows = rng.choice(WINDOWS)
        self.num_pages = rng.randint(3, 12) * len(self.windows)
        self.block_size = rng.randint(1, 5)
        max_num_seqs = rng.choice([1, 2, 3, 4, 5, 5, 6, 6])
        self.budget = max_num_seqs + rng.choice([0, 1, 2, 5, 30])
        self.chunk = ChunkPolicy(
            rng.choice([None, None, 1, 2, 5]), rng.choice([(), (2, 4, 6, 8, 12, 40)])
        )
        policy_module.END_SHARE = rng.choice([1, 32])
        scheduler_module.SAVED_BLOCKS = rng.choice([1, 2])
        num_host_pages = rng.choice([0, 2, 5, 12, 40]) * len(self.windows)
        num_states = rng.randint(0, 6), rng.randint(0, 3)
        self.states = num_states if rng.random() < 0.4 and self.num_sets == 1 else None
        self.groups = [CacheGroup(self.block_size, w, self.budget) for w in self.windows]
        self.blocks = BlockManager(
            self.num_pages,
            self.block_size,
            num_host_pages,
            enable_prefix_caching=rng.random() < 0.8,
            groups=self.groups,
            states=StatePool(max_num_seqs + 1, *self.states) if self.states else None,
        )
        planner_module.FREE_PAGES_WATERMARK = rng.choice([0.01, 0.01, 0.1, 0.3])
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            chunk_policy=self.chunk,
            policy=rng.choice(["fcfs", "priority"]),
            preemption_mode=rng.choice(["auto", "swap", "recompute"]),
            swap_cost=rng.choice([None, SwapCost(1.0, rng.choice([0.1, 0.5, 2.0]), 0.5)]),
            num_sets=self.num_sets,
        )
        self.device = FakeDevice(
            num_pages=self.num_pages,
            num_host_pages=num_host_pages,
            block_size=self.block_size,
            max_num_seqs=max_num_seqs,
            rng=random.Random(self.seed + 1),
            lazy=rng.random() < 0.7,
            windows=self.windows,
            states=self.states,
            in_parts=self.num_sets > 1,
        )
        self._pending_emit: list[TokenUpdate] = []
        self.num_to_come = rng.randint(4, 16)
        self.rush = rng.choice([0, 0, 1, 6])  # most event loop turns between two arrivals
        self.abort_rate = rng.choice([0.0, 0.02, 0.1, 0.2])
        self.bases = [[rng.randint(0, 2) for _ in range(12)] for _ in range(2)]

    # --- the verbs of the pipeline ---

    def plan(self) -> StepPlan | None:
        swapped = [s for s in self.scheduler.waiting if s.status is SequenceStatus.SWAPPED]
        on_host = {seq.seq_id: self.blocks.num_pages_to_swap(seq) for seq in swapped}
        sets = self.scheduler.sets
        running = [seq for each in sets for seq in each.seqs]
        prefilling = [seq for seq in running if seq.num_computed < seq.num_prefill]
        self.forced = {id(seq) for each in sets for seq in each.forced}
        plan = self.scheduler.plan()
        self._check_sequences()
        self.seen["preemption of a jump"] += sum(
            id(seq) in self.forced and seq.status is not SequenceStatus.RUNNING
            for seq in self.scheduler.waiting
        )
        self.seen["preemption of a prefill"] += sum(
            seq.status is not SequenceStatus.RUNNING for seq in prefilling
        )
        if plan is not None:
            self.num_steps += 1
            self._note_plan(plan, on_host)
            assert plan.num_tokens <= self.budget
            self._check_chunk(plan)
            assert len({id(s) for s in plan.sampled}) == len(plan.sampled)
        return plan

    def _check_chunk(self, plan: StepPlan) -> None:
        """Prompt tokens beside decodes are few; those of who just came back do not count."""
        back = {id(init.seq) for init in plan.slot_inits if id(init.seq) not in self.forced}
        num_decodes = sum(id(seq) not in back for seq in plan.decodes.seqs)
        jumped = [row for row in plan.prefills if id(row.seq) in self.forced]
        if (num_decodes or jumped) and self.chunk.chunk_tokens is not None:
            num_prompt_tokens = plan.num_tokens - len(plan.decodes)
            num_jumped = sum(len(row.token_ids) for row in jumped)
            num_prompt_tokens -= num_jumped
            num_waited = sum(len(request.prompt_token_ids) for request in self.requests)
            # Of those with a new slot some were running: their slots are rewritten.
            counts = range(num_decodes + num_jumped, len(plan.decodes) + num_jumped + 1)
            budgets = [self.chunk.budget(count, num_waited, [num_waited]) for count in counts]
            assert num_prompt_tokens <= max(each.num_tokens + each.to_end for each in budgets)
            self.seen["chunk beside decodes"] += num_prompt_tokens == self.chunk.chunk_tokens

    def launch(self, plan: StepPlan) -> FakeLaunched:
        return self.device.launch(plan)

    async def end(self, plan: StepPlan, launched: LaunchedStep) -> None:
        assert isinstance(launched, FakeLaunched)
        if plan.needs_host:
            await self.constrain(plan, launched)
        elif self.num_sets > 1:
            launched.sample(np.zeros(0, np.int32))

    async def constrain(self, plan: StepPlan, launched: LaunchedStep) -> None:
        for _ in range(self.rng.randint(0, 2)):  # clients come and go meanwhile
            await asyncio.sleep(0)
        assert isinstance(launched, FakeLaunched)
        moments = [self.emit, lambda: None]  # the thread works beside the loop
        self.rng.shuffle(moments)
        constrained = constrain(plan, self.host, launched.sample, moments[0])
        moments[1]()
        assert not constrained.failures
        for _ in range(self.rng.randint(0, 2)):
            await asyncio.sleep(0)
        for seq, token_ids in constrained.forced:
            if seq.status is SequenceStatus.RUNNING:
                self.seen["jump"] += 1
                self._take(self.scheduler.jump_forward(seq, token_ids))
        self.scheduler.check_integrity()

    def host(self) -> np.ndarray:
        """As a mask buffer."""
        return self.device.masks

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        self.seen["wasted row"] += sum(
            s.status is SequenceStatus.FINISHED and s.finish_reason != "abort" for s in plan.sampled
        )
        self._pending_emit = self.scheduler.finish_step(plan, result)
        self._check_sequences()
        work = sum(self._most_steps(request) for request in self.requests)
        for request in scheduled_requests(self.scheduler).values():
            age = self.num_steps - self.steps_at_add[request.request_id]
            assert age <= 4 * work * self.num_sets, (
                f"{request.request_id} has waited for {age} steps"
            )

    def emit(self) -> None:
        updates, self._pending_emit = self._pending_emit, []
        self._take([u for u in updates if u[0].finish_reason != "abort"])

    def _take(self, updates: list[TokenUpdate]) -> None:
        """As the output processor: ends by text, after the scheduler's own."""
        for seq in dict.fromkeys(seq for seq, _, _ in updates):
            num_new = sum(updated is seq for updated, _, _ in updates)
            output_ids = seq.token_ids[seq.num_prompt_tokens :]
            end = None
            if seq.request.request_id in self.stop_strings:
                ends = range(len(output_ids) - num_new + 1, len(output_ids) + 1)
                end = next((i for i in ends if ends_with_stop_string(output_ids[:i])), None)
            if end is not None and end < len(output_ids):
                self.seen["stop string amid a jump"] += 1
                self.cut[seq.seq_id] = end
            if seq.status is SequenceStatus.FINISHED:
                self._note_finish(seq)
            elif end is not None:
                if seq.status is not SequenceStatus.RUNNING:
                    self.seen["finished while preempted"] += 1
                self.scheduler.finish(seq, "stop", "string")
                self.seen["finish by the output processor"] += 1
                self._note_finish(seq)

    def _check_sequences(self) -> None:
        self.scheduler.check_integrity()
        for seq in (seq for each in self.scheduler.sets for seq in each.seqs):
            most = seq.num_prompt_tokens + seq.request.max_tokens
            assert seq.num_tokens <= most, f"{seq.seq_id}: a row is wasted on a known end"
        for seq in self.scheduler.waiting:
            assert seq.slot == PADDING_SLOT
            assert seq.status is SequenceStatus.SWAPPED or seq.num_computed == 0

    async def wait_to_plan(self) -> None:
        pass

    async def idle(self) -> None:
        if self.clients.done():
            raise WorldIsDone
        assert not self.scheduler.num_requests, "live requests and nothing to plan: stuck"
        await asyncio.sleep(0)

    # --- the clients ---

    async def _run_clients(self) -> None:
        """Requests come and go at random turns of the event loop, also while a step is awaited."""
        while self.num_to_come or self.scheduler.num_requests:
            for _ in range(self.rng.randint(0, self.rush)):
                await asyncio.sleep(0)
            if self.num_to_come:
                self.num_to_come -= 1
                self._add(self._random_request())
            if self.rng.random() < self.abort_rate:
                self._abort_one()
            if self.rng.random() < 0.002:
                self.blocks.reset_prefix_cache()
                self.seen["cache reset"] += 1
            self._check_sequences()
            await asyncio.sleep(0)

    def _random_request(self) -> Request:
        rng = self.rng
        fits = num_blocks_that_fit(self.groups, self.num_pages, self.num_pages)
        most = min(fits * self.block_size, MAX_LEN)  # what admission lets in
        request_id = f"r{len(self.requests)}"
        prompt = self._random_prompt(request_id)[: max(1, most - rng.randint(1, 9))]
        max_tokens = rng.randint(1, max(1, most - len(prompt)))
        request = make_request(
            len(self.requests),
            prompt,
            max_tokens=max_tokens,
            priority=rng.randint(-1, 1),
            eos_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 2])),
            bad_words_ids=self._random_bad_words(),
            cache_key=rng.choice([b"", b"", b"adapter"]),
            n=rng.choice([1, 1, 1, 2, 3, 5]),
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 3])),
            prompt_logprobs=rng.choice([None, None, None, None, None, 0]),
        )
        if rng.random() < 0.3:
            for seq in request.sequences:
                share = rng.choice([0.0, 0.5, 0.8])
                seq.constraint = Automaton(rng.randint(0, 9), VOCAB_SIZE, share)
        if rng.random() < 0.3:
            self.stop_strings.add(request.request_id)
        return request

    def _random_prompt(self, request_id: str) -> list[int]:
        """Few token ids and few beginnings, some of them the text of an answer given before."""
        rng = self.rng
        start = rng.choice(self.bases)
        if self.finished_texts and rng.random() < 0.5:
            start, self.followed[request_id] = rng.choice(self.finished_texts[-2:])
        start = start[: rng.choice([len(start), rng.randint(0, len(start))])]
        return start + [rng.randint(0, 1) for _ in range(rng.randint(0 if start else 1, 3))]

    def _random_bad_words(self) -> tuple[tuple[int, ...], ...]:
        """Mostly none; single tokens; or words of several, that need the tokens before."""
        rng = self.rng
        ids = rng.sample(range(VOCAB_SIZE), 30)
        return rng.choice(
            [(), (), (), ((ids[0],), (ids[1],)), tuple((i, j) for i in ids[:20] for j in ids[20:])]
        )

    def _add(self, request: Request) -> None:
        self.requests.append(request)
        self.steps_at_add[request.request_id] = self.num_steps
        self.scheduler.add(request)

    def _abort_one(self) -> None:
        """Abort a request that has a sequence in a random one of the states there are now."""
        by_state: dict[str, Request] = {}
        for request in scheduled_requests(self.scheduler).values():
            by_state |= {self._state(s): request for s in request.sequences}
        by_state.pop("finished", None)
        if by_state:
            request = by_state[self.rng.choice(sorted(by_state))]
            self.seen.update({f"abort {self._state(s)}" for s in request.sequences})
            del self.seen["abort finished"]
            assert self.scheduler.abort(request.request_id) is request
            assert request.request_id not in scheduled_requests(self.scheduler)

    @staticmethod
    def _most_steps(request: Request) -> int:
        """Steps of one token each, at most."""
        return len(request.sequences) * (len(request.prompt_token_ids) + request.max_tokens)

    # --- what happened ---

    def _note_plan(self, plan: StepPlan, on_host: dict[int, int]) -> None:
        seen = self.seen
        seen["copy on write"] += len(plan.page_copies)
        seen["page left behind"] += sum(not append.block_id for append in plan.page_appends)
        seen["hit behind a window"] += sum(
            not pages[0] for init in plan.slot_inits for pages in init.block_ids
        )
        states = plan.states
        seen["state swapped"] += len(states.swap_out)
        seen["state from a snapshot"] += sum(row != PADDING_SLOT for row, _ in states.restore)
        seen["state of an answer saved"] += len(states.save)
        seen["state forked"] += len(states.fork)
        seen["two snapshots of a chunk"] += sum(len(row.saves) > 1 for row in plan.prefills)
        begun = [row.start > row.seq.num_cached_tokens for row in plan.prefills]
        seen["short prompt before a long one"] += (False, True) in pairwise(begun)
        for row in plan.prefills:
            seen["chunked prefill"] += not row.samples
            seen["fork"] += len(row.samples[1:])
            if row.samples:
                siblings = row.seq.request.sequences
                seen["fork without a slot"] += sum(
                    s.status is SequenceStatus.WAITING and s.num_prefill == 0 for s in siblings
                )
        moved = len(plan.swap_in)
        back = sum(on_host.get(init.seq.seq_id, 0) for init in plan.slot_inits)
        if any(init.seq.seq_id in on_host for init in plan.slot_inits):
            seen["swapped page still on the device"] += max(0, back - moved)
        else:
            seen["host hit"] += moved

    def _note_finish(self, seq: Sequence) -> None:
        assert seq.finish_reason is not None
        self.seen[f"finish {seq.finish_reason}"] += 1
        self.finished_texts.append((list(seq.token_ids), seq.num_prompt_tokens))
        if self.rng.random() < 0.2 and len(self.requests) < MAX_REQUESTS:
            self.num_to_come += 1  # the dialogue goes on

    def _state(self, seq: Sequence) -> str:
        if seq.status is SequenceStatus.FINISHED:
            return "finished"
        if seq.status is SequenceStatus.RUNNING:
            state = "prefilling" if seq.num_computed < seq.num_prefill else "decoding"
        elif seq.status is SequenceStatus.SWAPPED:
            state = "swapped"
        elif seq not in self.scheduler.waiting:
            state = "unforked"
        else:
            state = "preempted" if seq.num_prefill else "waiting"
        return state + (", in flight" if seq.num_in_flight else "")

    # --- from the first request to the last check ---

    async def run_steps(self) -> None:
        if self.num_sets > 1:
            await run_staged(self, len(self.scheduler.sets))
        await (run_ahead(self) if self.ahead else run_synchronous(self))

    async def run(self) -> None:
        self.clients = asyncio.create_task(self._run_clients())
        with pytest.raises(WorldIsDone):
            await self.run_steps()
        await self.clients
        self.scheduler.check_empty()
        for request in self.requests:
            for seq in request.sequences:
                self._check_answer(seq)
            before = self.followed.get(request.request_id, 1 << 30)
            is_hit = request.sequences[0].num_cached_tokens > before
            self.seen["prefix hit of an output"] += is_hit
            self.seen["state of an answer found"] += is_hit and self.states is not None
        stats = self.scheduler.stats()
        self.seen["swap preemption"] += stats.num_preemptions_swap
        self.seen["recompute preemption"] += stats.num_preemptions_recompute
        self.seen["prefix hit"] += stats.prefix_cache_hits

    def _check_answer(self, seq: Sequence) -> None:
        has_stop = seq.request.request_id in self.stop_strings
        right = generate_alone(seq, has_stop, self.windows, self.states is not None)
        output_ids = seq.token_ids[seq.num_prompt_tokens :]
        if seq.seq_id in self.cut:
            assert right == Answer(output_ids[: self.cut[seq.seq_id]], "stop", "string")
            return
        what = f"{seq.request.request_id}, sequence {seq.index}"
        if seq.finish_reason == "abort":
            assert output_ids == right.output_ids[: len(output_ids)], what
        else:
            assert Answer(output_ids, seq.finish_reason, seq.stop_reason) == right, what  # type: ignore[arg-type]
