#!/usr/bin/env python3
"""Simulates a cluster of 8 to 1,000 GPUs, to compare policies that place requests on engines.

Router, Scheduler and BlockManager are the real ones; no kernel runs and no clock is read. A step
takes the time that `simulated_device.py` models, for Llama-3.1-8B on an H100 unless `--device` says
another, and each engine plans one step ahead, like `pipeline.run_ahead`. Tensor-parallel GPUs are
one engine, which gets the traffic of all of them. Conversations arrive at random, with a seed, so
all policies get the same ones: they share system prompts, each turn repeats all turns before it,
and there are pauses.

All requests of a large cluster go through the router, but only `--sample` of its engines, evenly
spread over the ranks, have schedulers; the figures are of the requests placed there. A request on
another engine takes as long as a random one of those that ended last on these, so that load and
later messages come at realistic times.

    simulate_cluster.py                                  # 8 and 64 GPUs, all policies
    simulate_cluster.py --gpus 1000 --sample 16 --seconds 15 --policy affinity
    simulate_cluster.py --gpus 8 --device 8b 8b-tp2 8b-tp4 --policy affinity --rate 8
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from placement_policies import Policy, policies
from simulate_schedule import FINISH_S, FINISH_TOKEN_S, LAUNCH_S, PLAN_S, percentile
from simulated_device import DEVICES, Device
from simulated_traffic import Conversation, Population, Traffic, make_request

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.data_parallel.router import Placement
from asyncllm.engine.scheduler import Scheduler
from asyncllm.flag_values import PREFILL_GRAPH_SIZES
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, SequenceStatus, StepResult

DEFAULT_DEVICE = "8b-h100"
BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8192
START_S = PLAN_S + LAUNCH_S["prefill"]  # from an arrival at an idle engine until it computes
ANSWER_TOKEN = 7
ENDED_KEPT = 64  # last requests whose times are drawn; few, as the load changes
FIRST_TIMES = (0.03, 0.008)  # TTFT and TPOT in seconds until a request has ended


@dataclass(slots=True, eq=False)
class Client:
    """A request, as its client sees it."""

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


@dataclass(slots=True, eq=False)
class Engine:
    """A scheduler, and the step that its device runs; None while it is idle."""

    scheduler: Scheduler
    plan: StepPlan | None = None


@dataclass
class Simulation:
    """Simulated time advances from event to event, in the order of all engines' events."""

    num_engines: int
    device: Device
    traffic: Traffic  # of an engine
    policy: Policy
    seconds: float
    seed: int
    num_sampled: int | None = None  # engines that have a scheduler; None: all
    ended: list[Client] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # of arrivals
        self._population = Population(self.traffic, self.num_engines, self.seed)
        chunks = ChunkPolicy.choose(None, self.device.cost, PREFILL_GRAPH_SIZES)
        sampled = self.num_sampled or self.num_engines
        self._engines = {
            i * self.num_engines // sampled: Engine(
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
        """Start conversations for `seconds`, and run until the last of their requests ends."""
        rate, at = self.traffic.conversations_per_s * self.num_engines, 0.0
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
        request = make_request(next(self._numbers), conversation.tokens.tolist(), answer_tokens)
        self._clients[request.request_id] = Client(conversation, request, now, placement)
        engine.scheduler.add(request)
        if engine.plan is None:
            self._launch(engine, now + START_S)

    def _answer_unseen(
        self, conversation: Conversation, placement: Placement, answer_tokens: int, now: float
    ) -> None:
        """The message is sent to an engine without a scheduler."""
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
        """A step ends. The next one was planned before its tokens were known."""
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
        """A request has ended; its conversation may have another turn."""
        self.policy.ended(placement)
        conversation.tokens.extend([ANSWER_TOKEN] * answer_tokens)
        if conversation.turns_left and len(conversation.tokens) < self.traffic.most_tokens:
            pause = conversation.rng.expovariate(1 / self.traffic.pause_s)
            self._at(now + pause, lambda then: self._say(conversation, then))


# --- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slo:
    """The limits within which a request counts as good."""

    ttft_s: float = 0.5
    tpot_s: float = 0.015

    def is_met(self, client: Client) -> bool:
        return client.ttft <= self.ttft_s and client.tpot <= self.tpot_s


COLUMNS = ("GPUs", "device", "policy", "good requests/s per GPU", "share good",
           "TTFT p50 / p99, ms", "TPOT p50 / p99, ms", "prompt tokens cached")  # fmt: skip


def simulate(
    num_gpus: int,
    policy: str,
    seconds: float,
    traffic: Traffic,
    seed: int = 0,
    num_sampled: int | None = None,
    slo: Slo = Slo(),
    device_name: str = DEFAULT_DEVICE,
) -> dict[str, float]:
    """The figures of all requests after the first third of the time, in which caches fill."""
    device = DEVICES[device_name]
    num_engines = num_gpus // device.num_gpus
    made = policies(num_engines, device.num_pages * BLOCK_SIZE, seed)[policy]()
    num_sampled = min(num_sampled or num_engines, num_engines)
    of_engine = replace(
        traffic,
        conversations_per_s=traffic.conversations_per_s * device.num_gpus,
        systems_per_gpu=traffic.systems_per_gpu * device.num_gpus,
    )
    simulation = Simulation(num_engines, device, of_engine, made, seconds, seed, num_sampled)
    simulation.run()
    clients = [c for c in simulation.ended if c.arrival >= seconds / 3]
    good = sum(map(slo.is_met, clients))
    ttfts, tpots = [c.ttft * 1e3 for c in clients], [c.tpot * 1e3 for c in clients]
    num_prompt = sum(len(c.request.prompt_token_ids) for c in clients)
    return {
        "requests": len(clients),
        "steps": simulation.num_steps,
        "goodput": good / (seconds * 2 / 3) / num_sampled / device.num_gpus,
        "good_share": good / len(clients),
        "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99),
        "tpot_p50": percentile(tpots, 0.5),
        "tpot_p99": percentile(tpots, 0.99),
        "cached_share": sum(c.num_cached for c in clients) / num_prompt,
    }


def row(num_gpus: int, device: str, policy: str, r: dict[str, float]) -> str:
    cells = (
        f"{num_gpus:,}", device, policy, f"{r['goodput']:.2f}", f"{r['good_share'] * 100:.1f} %",
        f"{r['ttft_p50']:,.0f} / {r['ttft_p99']:,.0f}",
        f"{r['tpot_p50']:.1f} / {r['tpot_p99']:.1f}", f"{r['cached_share'] * 100:.0f} %",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seconds", type=float, default=45.0, help="of arrivals")
    parser.add_argument("--device", nargs="+", choices=DEVICES, default=[DEFAULT_DEVICE])
    parser.add_argument("--policy", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--rate", type=float, help="conversations per second and GPU")
    parser.add_argument("--sample", type=int, help="engines with a scheduler (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for num_gpus, device in itertools.product(args.gpus, args.device):
        if num_gpus % DEVICES[device].num_gpus:
            parser.error(f"{num_gpus} GPUs are no whole number of {device}")
    traffic = Traffic() if args.rate is None else Traffic(conversations_per_s=args.rate)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    results = []
    every = itertools.product(args.gpus, args.device, args.policy or policies(1, 0, 0))
    for num_gpus, device, policy in every:
        start = time.perf_counter()
        load = num_gpus, policy, args.seconds, traffic, args.seed, args.sample
        result = simulate(*load, device_name=device)
        print(row(num_gpus, device, policy, result), flush=True)
        took = round(time.perf_counter() - start, 1)
        which = {"gpus": num_gpus, "device": device, "policy": policy}
        results.append({**which, **result, "took_s": took})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
