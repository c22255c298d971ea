#!/usr/bin/env python3
"""Simulates how the size of prefill chunks changes latencies: the real Scheduler, a modelled GPU.

No kernel runs and no clock is read. A step takes the time that `simulated_device.py` models, the
host launches one step ahead like `pipeline.run_ahead`, as late as `StepClock` allows, and requests
arrive as in the workloads of the load test. So policies are compared on the same arrivals. The
figures are those of a model, without HTTP: they help to choose a rule, and are no results.

    simulate_schedule.py                                     # all policies on all workloads, 8B
    simulate_schedule.py --model 0.6b --workload tput rate16 --policy unbounded default
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from dataclasses import dataclass, field
from statistics import fmean

from simulated_device import DEVICES, Device
from simulated_traffic import make_request

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import UNBOUNDED, ChunkPolicy
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.step_clock import StepClock
from asyncllm.flag_values import PREFILL_GRAPH_SIZES
from asyncllm.step_plan import StepKind, StepPlan
from asyncllm.types import DeviceTimes, Request, SequenceStatus, StepResult

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 8192
PLAN_S = 0.0003  # from the plan until the device begins; hidden unless it is idle
LAUNCH_S = {"decode": 0.00015, "prefill": 0.0005, "mixed": 0.0005}
FINISH_S, FINISH_TOKEN_S = 0.0001, 8e-6  # per step and per token: scheduler, text, frames
CLIENT_S = 0.001  # from a request's last token to the next request's arrival
ARRIVAL_S = (0.0004, 0.0008)  # between two requests whose clients got their last tokens at once
FIRST_S = 0.0001  # between the first requests of a closed loop, which wait in their sockets
TURN_S = 0.001  # spent on arrivals in one iteration of the event loop


def policies(device: Device) -> dict[str, ChunkPolicy]:
    return {
        "unbounded": UNBOUNDED,
        **{str(size): ChunkPolicy(size) for size in (256, 512, 1024, 2048)},
        "default": ChunkPolicy.choose(None, device.cost, PREFILL_GRAPH_SIZES),
    }


@dataclass(frozen=True)
class Workload:
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int = 0  # closed loop; 0: Poisson arrivals at `rate`
    rate: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    short_len: int = 0  # length of every other prompt
    num_times: int = 1  # runs with other random numbers, which are averaged


WORKLOADS = {
    "lat8": Workload(32, 128, 256, concurrency=8, num_times=8),
    "lat16": Workload(128, 128, 256, concurrency=16, num_times=4),
    "tput": Workload(768, 512, 256, concurrency=256),
    "rate8": Workload(320, 1024, 128, rate=8.0, num_times=2),
    "rate16": Workload(640, 1024, 128, rate=16.0, num_times=2),
    "prefix": Workload(512, 128, 64, concurrency=64, prefix_len=2048, num_prefixes=8),
    "long": Workload(64, 7000, 64, concurrency=8),
    "chat": Workload(600, 200, 100, rate=30.0, num_times=2),
    "burst": Workload(256, 512, 256, concurrency=256),
    "prompts": Workload(512, 1024, 256, concurrency=256),
    "queue": Workload(1024, 512, 256, concurrency=512),
    "mixed": Workload(160, 7000, 64, rate=4.0, short_len=128, num_times=2),
}


@dataclass
class Client:
    """A request, as its client sees it."""

    request: Request
    arrival: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True)
class SimulatedStep:
    """A `LaunchedStep` whose times are known when it is launched."""

    times: DeviceTimes

    async def wait(self) -> StepResult:
        raise NotImplementedError

    def device_times(self) -> DeviceTimes:
        return self.times


class Simulation:
    """Simulated time advances from step to step; `_arrivals` holds requests to come."""

    def __init__(
        self, device: Device, workload: Workload, policy: ChunkPolicy, seed: int = 0
    ) -> None:
        self._rng = rng = random.Random(seed)
        self._device, self._workload = device, workload
        self._scheduler = Scheduler(
            BlockManager(device.num_pages, BLOCK_SIZE),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            chunk_policy=policy,
        )
        self._to_come = _requests(workload, rng)
        self._arrivals: list[tuple[float, str]] = []
        self.clients: dict[str, Client] = {}
        self.num_prefilled = 0
        self._clock = StepClock()
        self._now = self._free_at = 0.0  # time on the host; when the device will be idle
        clock = 0.0
        for _ in range(workload.concurrency or workload.num_prompts):
            clock += rng.expovariate(workload.rate) if workload.rate else FIRST_S
            self._send(clock)

    def _send(self, clock: float) -> None:
        request = self._to_come.pop()
        self.clients[request.request_id] = Client(request, clock)
        heapq.heappush(self._arrivals, (clock, request.request_id))

    def run(self) -> float:
        """Simulate until all requests have ended. Returns the simulated seconds."""
        in_flight: tuple[StepPlan, SimulatedStep] | None = None
        while True:
            wait = self._clock.seconds_to_plan(self._now) if in_flight is not None else 0.0
            self._now += wait
            self._take_arrivals(self._now + (0.0 if wait else TURN_S))
            plan = self._scheduler.plan()
            launched = (plan, self._launch(plan)) if plan is not None else None
            if in_flight is not None:
                self._finish(*in_flight)
            elif launched is None:
                if not self._arrivals:
                    return self._now
                self._clock.idle()
                self._now = max(self._now, self._arrivals[0][0])
            in_flight = launched

    def _take_arrivals(self, end: float) -> None:
        """Add the requests that arrive until `end`. It is later than now if requests arrive while
        the event loop handles arrivals."""
        while self._arrivals and self._arrivals[0][0] <= end:
            arrival, request_id = heapq.heappop(self._arrivals)
            self._now = max(self._now, arrival)
            self._scheduler.add(self.clients[request_id].request)

    def _launch(self, plan: StepPlan) -> SimulatedStep:
        """The device begins while the host still launches, and ends after the launch."""
        started, num_prefill = self._now, sum(len(row.token_ids) for row in plan.prefills)
        self.num_prefilled += num_prefill
        begins = max(self._free_at, started + PLAN_S)
        kind = StepKind.of(len(plan.decodes), num_prefill)
        self._now = started + PLAN_S + LAUNCH_S.get(kind, 0.0)
        self._free_at = max(begins + self._device.step_s(plan), self._now)
        step = SimulatedStep(DeviceTimes(begins, self._free_at))
        self._clock.launched(step, self._now - started)
        return step

    def _finish(self, plan: StepPlan, step: SimulatedStep) -> None:
        self._now = now = max(self._now, step.times.ended)
        self._clock.finished(plan)
        tokens, told = StepResult([7] * len(plan.sampled)), now
        for seq, _, _ in self._scheduler.finish_step(plan, tokens):
            self.clients[seq.request.request_id].token_times.append(now)
            over = seq.status is SequenceStatus.FINISHED
            if over and self._to_come and self._workload.concurrency:
                told += self._rng.uniform(*ARRIVAL_S)
                self._send(told + CLIENT_S)
        self._now += FINISH_S + FINISH_TOKEN_S * len(plan.sampled)


def _requests(workload: Workload, rng: random.Random) -> list[Request]:
    size, prefix_len = workload.num_prefixes, workload.prefix_len
    prefixes = [[rng.randrange(1 << 17) for _ in range(prefix_len)] for _ in range(size)]
    requests = []
    for i in range(workload.num_prompts):
        own = workload.short_len if workload.short_len and i % 2 else workload.input_len
        prompt = rng.choice(prefixes) + [rng.randrange(1 << 17) for _ in range(own)]
        requests.append(make_request(i, prompt, workload.output_len))
    return requests[::-1]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def simulate(device: Device, workload: Workload, policy: ChunkPolicy) -> dict[str, float]:
    """Latencies in ms."""
    times = [simulate_once(device, workload, policy, i) for i in range(workload.num_times)]
    return {name: round(fmean(time[name] for time in times), 3) for name in times[0]}


def simulate_once(
    device: Device, workload: Workload, policy: ChunkPolicy, seed: int
) -> dict[str, float]:
    simulation = Simulation(device, workload, policy, seed)
    seconds = simulation.run()
    clients = list(simulation.clients.values())
    num_output = sum(len(c.token_times) for c in clients)
    assert num_output == workload.num_prompts * workload.output_len
    num_prompt = sum(len(c.request.prompt_token_ids) for c in clients)
    gaps = [b - a for c in clients for a, b in zip(c.token_times, c.token_times[1:], strict=False)]
    result = {
        "ttft_p50": percentile([c.ttft for c in clients], 0.5) * 1e3,
        "ttft_p99": percentile([c.ttft for c in clients], 0.99) * 1e3,
        "tpot_p50": percentile([c.tpot for c in clients], 0.5) * 1e3,
        "itl_p50": percentile(gaps, 0.5) * 1e3,
        "itl_p99": percentile(gaps, 0.99) * 1e3,
        "output_per_s": num_output / seconds,
        "total_per_s": (num_output + num_prompt) / seconds,
        "prefilled_share": simulation.num_prefilled / num_prompt,
    }
    if workload.short_len:
        short = [c.ttft for c in clients if len(c.request.prompt_token_ids) == workload.short_len]
        result["short_ttft_p50"] = percentile(short, 0.5) * 1e3
        result["short_ttft_p99"] = percentile(short, 0.99) * 1e3
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=DEVICES, default="8b")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--policy", nargs="+", help="default: all", metavar="NAME")
    args = parser.parse_args()
    device = DEVICES[args.model]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for workload in args.workload:
        for name, policy in policies(device).items():
            if name in (args.policy or [name]):
                result = simulate(device, WORKLOADS[workload], policy)
                results.setdefault(workload, {})[name] = result
                figures = "  ".join(f"{key} {value:,.1f}" for key, value in result.items())
                print(f"{workload:7}{name:10}{figures}", flush=True)
    print(json.dumps({"model": args.model, "results": results}))


if __name__ == "__main__":
    main()
