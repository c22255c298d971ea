"""Every prompt gets on, whoever comes with it: random arrivals on the real scheduler, one ahead.

Lengths, limits and chunks are those of real engines, which `random_world.py` has not: there a
prompt is a dozen tokens. Pages last for all, so that nobody is preempted.
"""

from __future__ import annotations

import random
from typing import cast

import pytest

from asyncllm.engine.chunk_policy import ChunkPolicy, PrefillBudget
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, Sequence, SequenceStatus, StepResult
from tests.engine.builders import make_request, make_scheduler

NUM_REQUESTS = 40
MAX_LEN = 3000
BLOCK_SIZE = 64
SIZES = tuple(range(128, 1281, 128))
CHUNKS = (None, 1, 2, 7, 256, 512)


class Watched:
    """A policy, and what it said last."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self.last = PrefillBudget(0)

    def budget(self, num_decodes: int, num_startable: int, begun: list[int]) -> PrefillBudget:
        self.last = self._policy.budget(num_decodes, num_startable, begun)
        return self.last


class Crowd:
    """Requests of one seed, which come at random steps; some share beginnings, some leave."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        max_num_seqs = rng.choice([1, 2, 8, 64, 256])
        self.most = max(max_num_seqs, rng.choice([1, 16, 515, 2048, 8192]))
        sizes = rng.choice([(), (256, 512), SIZES])
        self.policy = Watched(ChunkPolicy(512, sizes) if sizes else ChunkPolicy(rng.choice(CHUNKS)))
        self.scheduler = make_scheduler(
            num_pages=2 * NUM_REQUESTS * MAX_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.most,
            chunk_policy=cast(ChunkPolicy, self.policy),
        )
        self.longest = rng.choice([20, 600, MAX_LEN]) if self.most > 16 else 100
        self.short_share = rng.choice([0.0, 0.5, 0.95])
        self.rush = rng.choice([0.05, 0.5, 3.0])  # requests in a step
        self.requests: list[Request] = []
        self.came: list[int] = []  # by request, at which step
        self.num_steps = 0
        self.least_share = self.most  # of a step's room, that the oldest prompt was due

    def come(self) -> None:
        """As many as come in one step."""
        rng, left = self.rng, NUM_REQUESTS - len(self.requests)
        for _ in range(min(left, int(rng.expovariate(1 / self.rush)) + (rng.random() < self.rush))):
            number, most = (
                len(self.requests),
                20 if rng.random() < self.short_share else self.longest,
            )
            base = rng.randrange(3) if rng.random() < 0.5 else 1000 + number
            prompt = [base] * rng.randint(1, most)
            self.requests.append(make_request(number, prompt, max_tokens=rng.randint(1, 30)))
            self.came.append(self.num_steps)
            self.scheduler.add(self.requests[-1])
        if self.requests and rng.random() < 0.02:
            self.scheduler.abort(rng.choice(self.requests).request_id)

    def plan(self) -> StepPlan | None:
        scheduler = self.scheduler
        begun = {seq: seq.num_computed for seq in scheduler.running.prefilling()}
        has_slot = scheduler.running.num_free_slots > 0
        heads = list(begun)[:1] or list(scheduler.waiting)[: int(has_slot)]
        plan = scheduler.plan()
        if plan is not None:
            self.num_steps += 1
            assert plan.num_tokens <= self.most
            if heads:
                self._check_share(plan, heads[0], is_begun=bool(begun))
        return plan

    def _check_share(self, plan: StepPlan, oldest: Sequence, is_begun: bool) -> None:
        """The oldest has the step's room, or half of it where others end beside it."""
        room, num_decodes = self.policy.last, len(plan.decodes)
        assert plan.num_tokens - num_decodes <= room.num_tokens + room.to_end
        (row,) = [row for row in plan.prefills if row.seq is oldest]
        share = min(room.num_tokens, self.most - num_decodes)
        share = -(-share // 2) if is_begun else share
        assert len(row.token_ids) >= min(oldest.num_prompt_tokens - row.start, share)
        self.least_share = min(self.least_share, share)

    def finish(self, plan: StepPlan) -> None:
        self.scheduler.finish_step(plan, StepResult([7] * len(plan.sampled)))

    def check_waits(self, ended: dict[int, int]) -> None:
        """Nobody has waited for more than whoever came before, each taking its turn alone."""
        most = 0
        for number, request in enumerate(self.requests):
            num_prompt = len(request.prompt_token_ids)
            most += -(-num_prompt // max(1, self.least_share)) + request.max_tokens + 2
            assert ended[number] - self.came[number] <= most, request.request_id


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_every_prompt_gets_on(seed: int) -> None:
    crowd, in_flight, ended = Crowd(seed), None, dict[int, int]()
    while len(ended) < NUM_REQUESTS:
        crowd.come()
        plan = crowd.plan()
        if in_flight is not None:
            crowd.finish(in_flight)
        in_flight = plan
        for number, request in enumerate(crowd.requests):
            if request.sequences[0].status is SequenceStatus.FINISHED:
                ended.setdefault(number, crowd.num_steps)
    crowd.check_waits(ended)
    crowd.scheduler.check_empty()
