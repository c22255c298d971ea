#!/usr/bin/env python3
"""Simulates how requests fare on 8 to 1,000 GPUs, by how they are placed: the real Router,
Scheduler and BlockManager on a model of an H100.

No kernel runs and no clock is read: a step lasts as long as `simulated_device.py` says, each
engine plans one step ahead as `pipeline.run_ahead` does, and conversations come at random, seeded:
system prompts that many share, turns that repeat all that was said before, pauses between them. So
policies are compared on the same conversations; the figures are a model's.

All requests of a large cluster go through the router, but only `--sample` of its engines, evenly
spread over the ranks, have schedulers: figures are those of the requests placed there. On another
engine a request takes as long as one of the last that ended on these, drawn at random: so its load
and the next message of its conversation come about when they would.

    simulate_cluster.py                                  # 8 and 64 GPUs, all policies
    simulate_cluster.py --gpus 1000 --sample 16 --seconds 15 --policy affinity
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from simulate_schedule import FINISH_S, FINISH_TOKEN_S, LAUNCH_S, PLAN_S, percentile
from simulated_device import DEVICES, Device

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.data_parallel.router import Placement, Router
from asyncllm.engine.scheduler import Scheduler
from asyncllm.flag_values import PREFILL_GRAPH_SIZES
from asyncllm.outputs import RequestMetrics
from asyncllm.sampling_params import SamplingParams
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, SequenceStatus, StepResult
from asyncllm.types import Sequence as RunningSequence

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8192
START_S = PLAN_S + LAUNCH_S["prefill"]  # from an arrival at an idle engine until it computes
ANSWER_TOKEN = 7
ENDED_KEPT = 64  # of the last requests, whose times others take: few, as load grows
FIRST_TIMES = (0.03, 0.008)  # TTFT and TPOT before one has ended, s


class Policy(Protocol):
    """`Router` is one."""

    def place(self, token_ids: Sequence[int], key: bytes = b"") -> Placement | None: ...

    def begun(self, placement: Placement) -> None: ...

    def ended(self, placement: Placement) -> None: ...


class Blind:
    """A policy that does not look at prompts: `choose` gets the live requests of each engine."""

    def __init__(self, num_engines: int, choose: Callable[[list[int]], int]) -> None:
        self._loads = [0] * num_engines
        self._choose = choose

    def place(self, token_ids: Sequence[int], key: bytes = b"") -> Placement | None:
        rank = self._choose(self._loads)
        self._loads[rank] += 1
        return Placement(rank, 1, 0)

    def begun(self, placement: Placement) -> None:
        """It knows only who is live."""

    def ended(self, placement: Placement) -> None:
        self._loads[placement.rank] -= 1


def policies(num_engines: int, device: Device, seed: int) -> dict[str, Callable[[], Policy]]:
    capacity = device.num_pages * BLOCK_SIZE
    return {
        "random": lambda: Blind(num_engines, _random_choice(random.Random(seed))),
        "round robin": lambda: Blind(num_engines, _in_turn(itertools.count())),
        "least load": lambda: Blind(num_engines, lambda loads: loads.index(min(loads))),
        "affinity": lambda: Router([capacity] * num_engines),
    }


def _random_choice(rng: random.Random) -> Callable[[list[int]], int]:
    return lambda loads: rng.randrange(len(loads))


def _in_turn(numbers: itertools.count[int]) -> Callable[[list[int]], int]:
    return lambda loads: next(numbers) % len(loads)


# --- traffic -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """One GPU's load; lengths in tokens, log-normal about medians. Conversations are Poisson."""

    conversations_per_s: float = 5.0
    mean_turns: float = 5.0  # geometric
    pause_s: float = 6.0  # mean, from an answer to the next message
    system_tokens: int = 1024
    systems_per_gpu: float = 2.0  # distinct system prompts; some are far more used than others
    message_tokens: int = 160
    answer_tokens: int = 200
    most_tokens: int = 6000  # of a prompt: then the conversation ends


@dataclass(slots=True)
class Conversation:
    """It draws its own numbers: what it says does not depend on how others fare."""

    rng: random.Random
    tokens: array[int]
    turns_left: int


@dataclass(slots=True, eq=False)
class Client:
    """One request as its client sees it."""

    conversation: Conversation
    request: Request
    arrival: float
    placement: Placement
    first: float = 0.0
    last: float = 0.0
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(self.request.max_tokens - 1, 1)


class Population:
    """Draws conversations and their messages."""

    def __init__(self, traffic: Traffic, num_gpus: int, seed: int) -> None:
        self._traffic, self._seed = traffic, seed
        self._numbers = itertools.count()
        rng = random.Random(f"{seed} systems")
        count = max(round(traffic.systems_per_gpu * num_gpus), 1)
        self._systems = [_text(rng, traffic.system_tokens) for _ in range(count)]
        self._weights = [*itertools.accumulate(1 / (i + 1) for i in range(count))]  # Zipf's

    def conversation(self) -> Conversation:
        rng = random.Random(f"{self._seed} {next(self._numbers)}")
        turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / self._traffic.mean_turns))
        (system,) = rng.choices(self._systems, cum_weights=self._weights)
        return Conversation(rng, system[:], turns)

    def say(self, conversation: Conversation) -> int:
        """Add a message; how long its answer will be."""
        conversation.tokens += _text(conversation.rng, self._traffic.message_tokens)
        return _length(conversation.rng, self._traffic.answer_tokens)


def _text(rng: random.Random, median: int) -> array[int]:
    """Tokens of nobody else: two texts that begin alike are one in a billion."""
    start, length = rng.randrange(1 << 30), _length(rng, median)
    tokens = (start + 7919 * np.arange(length)) % (1 << 30)
    return array("i", tokens.astype(np.int32).tobytes())


def _length(rng: random.Random, median: int) -> int:
    return min(max(int(median * math.exp(rng.gauss(0, 0.6))), 8), 6 * median)


# --- engines -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Engine:
    """A scheduler and the step that its device is at; None while it is idle."""

    scheduler: Scheduler
    plan: StepPlan | None = None


@dataclass
class Simulation:
    """Time goes from event to event, all engines' in one order."""

    num_gpus: int
    device: Device
    traffic: Traffic
    policy: Policy
    seconds: float
    seed: int
    num_sampled: int | None = None  # engines that have a scheduler; None: all
    ended: list[Client] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # of arrivals
        self._population = Population(self.traffic, self.num_gpus, self.seed)
        chunks = ChunkPolicy.choose(None, self.device.cost, PREFILL_GRAPH_SIZES)
        sampled = self.num_sampled or self.num_gpus
        self._engines = {
            i * self.num_gpus // sampled: Engine(
                Scheduler(
                    BlockManager(self.device.num_pages, BLOCK_SIZE),
                    max_num_seqs=MAX_NUM_SEQS,
                    max_num_batched_tokens=MAX_BATCHED_TOKENS,
                    chunk_policy=chunks,
                )
            )
            for i in range(sampled)
        }
        self._times = deque([FIRST_TIMES], ENDED_KEPT)  # TTFT and TPOT
        self._draws = random.Random(f"{self.seed} times")
        self._clients: dict[str, Client] = {}
        self._numbers = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []

    def run(self) -> None:
        """Conversations begin for `seconds`; the requests that have begun by then are ended."""
        rate, at = self.traffic.conversations_per_s * self.num_gpus, 0.0
        while (at := at + self._rng.expovariate(rate)) < self.seconds:
            self._at(at, lambda now: self._say(self._population.conversation(), now))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _say(self, conversation: Conversation, now: float) -> None:
        """The next message of a conversation arrives."""
        if now >= self.seconds:
            return
        answer_tokens = self._population.say(conversation)
        conversation.turns_left -= 1
        placement = self.policy.place(conversation.tokens)
        assert placement is not None, "all engines are open"
        engine = self._engines.get(placement.rank)
        if engine is None:
            self._answer_unseen(conversation, placement, answer_tokens, now)
            return
        request = _request(next(self._numbers), conversation.tokens.tolist(), answer_tokens)
        self._clients[request.request_id] = Client(conversation, request, now, placement)
        engine.scheduler.add(request)
        if engine.plan is None:
            self._launch(engine, now + START_S)

    def _answer_unseen(
        self, conversation: Conversation, placement: Placement, answer_tokens: int, now: float
    ) -> None:
        """On an engine without a scheduler."""
        ttft, tpot = self._draws.choice(self._times)
        end = now + ttft + tpot * (answer_tokens - 1)
        self._at(now + ttft, lambda _: self.policy.begun(placement))
        self._at(end, lambda then: self._go_on(conversation, placement, answer_tokens, then))

    def _launch(self, engine: Engine, now: float) -> None:
        engine.plan = plan = engine.scheduler.plan()
        if plan is not None:
            self.num_steps += 1
            engine.scheduler.publish_planned()
            self._at(now + self.device.step_s(plan), lambda end: self._finish(engine, plan, end))

    def _finish(self, engine: Engine, plan: StepPlan, now: float) -> None:
        """A step ends. The next was planned before its tokens were known."""
        self._launch(engine, now)
        told = now + FINISH_S + FINISH_TOKEN_S * len(plan.sampled)
        result = StepResult([ANSWER_TOKEN] * len(plan.sampled))
        for seq, _, _ in engine.scheduler.finish_step(plan, result):
            client = self._clients[seq.request.request_id]
            if not client.first:
                client.first, client.num_cached = told, seq.num_cached_tokens
                self.policy.begun(client.placement)
            client.last = told
            if seq.status is SequenceStatus.FINISHED:
                self._answered(client, told)

    def _answered(self, client: Client, now: float) -> None:
        del self._clients[client.request.request_id]
        self.ended.append(client)
        self._times.append((client.ttft, client.tpot))
        self._go_on(client.conversation, client.placement, client.request.max_tokens, now)

    def _go_on(
        self, conversation: Conversation, placement: Placement, answer_tokens: int, now: float
    ) -> None:
        """A request has ended: its conversation may have another turn."""
        self.policy.ended(placement)
        conversation.tokens.extend([ANSWER_TOKEN] * answer_tokens)
        if conversation.turns_left and len(conversation.tokens) < self.traffic.most_tokens:
            pause = conversation.rng.expovariate(1 / self.traffic.pause_s)
            self._at(now + pause, lambda then: self._say(conversation, then))


def _request(number: int, prompt: list[int], output_len: int) -> Request:
    request = Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=output_len, ignore_eos=True),
        max_tokens=output_len,
        stop_token_ids=frozenset(),
        metrics=RequestMetrics(arrival_time=0.0),
    )
    request.sequences.append(RunningSequence(number, request, 0, number, list(prompt)))
    return request


# --- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slo:
    """The limits that a request must keep to count as good."""

    ttft_s: float = 0.5
    tpot_s: float = 0.015

    def is_met(self, client: Client) -> bool:
        return client.ttft <= self.ttft_s and client.tpot <= self.tpot_s


COLUMNS = ("GPUs", "policy", "good requests/s per GPU", "share good", "TTFT p50 / p99, ms",
           "TPOT p50 / p99, ms", "prompt tokens cached")  # fmt: skip


def simulate(
    num_gpus: int,
    policy: str,
    seconds: float,
    traffic: Traffic,
    seed: int = 0,
    num_sampled: int | None = None,
    slo: Slo = Slo(),
) -> dict[str, float]:
    """Figures of the requests that came after the first third, in which caches fill."""
    device = DEVICES["8b-h100"]
    made = policies(num_gpus, device, seed)[policy]()
    num_sampled = min(num_sampled or num_gpus, num_gpus)
    simulation = Simulation(num_gpus, device, traffic, made, seconds, seed, num_sampled)
    simulation.run()
    clients = [c for c in simulation.ended if c.arrival >= seconds / 3]
    good = sum(map(slo.is_met, clients))
    ttfts, tpots = [c.ttft * 1e3 for c in clients], [c.tpot * 1e3 for c in clients]
    num_prompt = sum(len(c.request.prompt_token_ids) for c in clients)
    return {
        "requests": len(clients),
        "steps": simulation.num_steps,
        "goodput": good / (seconds * 2 / 3) / num_sampled,
        "good_share": good / len(clients),
        "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99),
        "tpot_p50": percentile(tpots, 0.5),
        "tpot_p99": percentile(tpots, 0.99),
        "cached_share": sum(c.num_cached for c in clients) / num_prompt,
    }


def row(num_gpus: int, policy: str, r: dict[str, float]) -> str:
    cells = (
        f"{num_gpus:,}", policy, f"{r['goodput']:.2f}", f"{r['good_share'] * 100:.1f} %",
        f"{r['ttft_p50']:,.0f} / {r['ttft_p99']:,.0f}",
        f"{r['tpot_p50']:.1f} / {r['tpot_p99']:.1f}", f"{r['cached_share'] * 100:.0f} %",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seconds", type=float, default=45.0, help="of arrivals")
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--rate", type=float, help="conversations per second and GPU")
    parser.add_argument("--sample", type=int, help="engines with a scheduler (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    traffic = Traffic() if args.rate is None else Traffic(conversations_per_s=args.rate)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    results = []
    for num_gpus in args.gpus:
        for policy in args.policy or policies(1, DEVICES["8b-h100"], 0):
            start = time.perf_counter()
            result = simulate(num_gpus, policy, args.seconds, traffic, args.seed, args.sample)
            print(row(num_gpus, policy, result), flush=True)
            took = round(time.perf_counter() - start, 1)
            results.append({"gpus": num_gpus, "policy": policy, **result, "took_s": took})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
