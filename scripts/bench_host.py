"""Measures the host's time per step and token: the whole server, on a device that only waits.

Scheduler, step packer, output processor, SSE writer and HTTP server are the real ones; the device
is simulated and its tokens are made up. The clients are another process on the loopback. One row
per number of streams, in microseconds per step:

  plan, build     the scheduler's plan; the plan as arrays
  launch          handing it to the device (here without the kernels' own launches)
  wake            from the device's end to the loop's taking notice
  finish, text    the scheduler's books; detokenising and stop strings
  emit, write     deltas and SSE frames; their writes, system calls included
  loop            everything else on the loop's thread
  us/token        all of it per token: the CPU time of the loop's thread, the wait apart
  threads         CPU time of all other threads, per step

Lag is how long a packet from another process lies before the loop sees it. With --answer-tokens
answers end, and their clients ask again: members change in almost every step. The quantiles of each
phase's steps are in the JSON line that ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import platform
import pstats
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from simulated_worker import SimulatedWorker, running_server
from tqdm import tqdm

from asyncllm.config import EngineArgs
from asyncllm.engine import core_loader
from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.engine_core import EngineCore
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.service import Service
from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult

PROMPT_TOKENS, MAX_TOKENS = 16, 3500
WARM_UP_STEPS, COUNTED_STEPS = 30, 20
PHASES = ("plan", "build", "launch", "wake", "finish", "text", "emit", "write")
CLIENTS = Path(__file__).with_name("bench_clients.py")


@dataclass
class Meter:
    """CPU seconds of the loop's thread per phase, from wrapped verbs; "wake" is of the clock."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0
    tokens: int = 0
    lags_s: list[float] = field(default_factory=list)
    marks: list[list[float]] = field(default_factory=list)  # `seconds` at each step's end

    def wrap(self, owner: Any, name: str, phase: str, *inner: str) -> None:
        """Add the time of a method to `phase`, without that of the phases within."""
        method: Callable[..., Any] = getattr(owner, name)
        clock, seconds = time.thread_time, self.seconds

        def timed(*args: Any) -> Any:
            within = sum(seconds[i] for i in inner)
            start = clock()
            result = method(*args)
            spent = clock() - start
            seconds[phase] += spent - (sum(seconds[i] for i in inner) - within)
            return result

        setattr(owner, name, timed)

    def watch(self, core: EngineCore, service: Service) -> None:
        worker: Any = core.worker
        self.wrap(core.steps, "plan", "plan")
        self.wrap(worker.packer, "pack", "build")
        self.wrap(core.steps, "launch", "launch", "build")
        self.wrap(core.live.outputs, "_emit_all", "emit")
        self.wrap(core.live.outputs, "process", "text", "emit")
        self.wrap(service.frames, "_write_slice", "write")
        finish = core.steps.finish

        def count(plan: StepPlan, result: StepResult) -> None:
            event = worker.in_flight.popleft().event
            self.seconds["wake"] += time.perf_counter() - event.due_s
            self.steps += 1
            self.tokens += len(result.token_ids)
            self.marks.append(list(self.seconds.values()))
            finish(plan, result)

        core.steps.finish = count  # type: ignore[method-assign]
        self.wrap(core.steps, "finish", "finish")
        self.wrap(core.steps, "emit", "finish", "text", "emit")
        self.wrap(core.steps, "observe", "finish")

    def reset(self) -> None:
        self.seconds.update(dict.fromkeys(PHASES, 0.0))
        self.steps = self.tokens = 0
        self.lags_s.clear()
        self.marks.clear()

    def quantiles_us(self) -> dict[str, list[float]]:
        """Phase -> its time in a step at percentiles 10, 50, 90, 99 and 100."""
        per_step = np.diff(np.array(self.marks), axis=0) * 1e6
        of_phases = np.percentile(per_step, [10, 50, 90, 99, 100], axis=0).T.round(1).tolist()
        return dict(zip(PHASES, of_phases, strict=True))


class LagProbe(asyncio.DatagramProtocol):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def datagram_received(self, data: bytes, address: Any) -> None:
        self._meter.lags_s.append(time.perf_counter() - struct.unpack("d", data)[0])


async def measure(args: argparse.Namespace, num_streams: int) -> dict[str, Any]:
    engine_args = EngineArgs(
        args.model, max_num_seqs=num_streams, max_num_batched_tokens=8192, chunked_prefill_size=1536
    )
    async with running_server(engine_args) as (engine, service, port):
        return await _with_clients(engine, service, port, args, num_streams)


async def _with_clients(
    engine: AsyncLLMEngine, service: Service, port: int, args: argparse.Namespace, num_streams: int
) -> dict[str, Any]:
    meter, core = Meter(), engine._running()
    assert isinstance(core, EngineCore)
    meter.watch(core, service)
    loop = asyncio.get_running_loop()
    lag, _ = await loop.create_datagram_endpoint(lambda: LagProbe(meter), ("127.0.0.1", 0))
    max_tokens = args.answer_tokens or MAX_TOKENS
    body = {"prompt": list(range(100, 100 + args.prompt_tokens)), "max_tokens": max_tokens}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0}
    lag_port = lag.get_extra_info("sockname")[1]
    ends = str(int(args.answer_tokens > 0))
    numbers = map(str, (port, num_streams, lag_port))
    clients = subprocess.Popen(  # noqa: ASYNC220 (once, at the start)
        [sys.executable, CLIENTS, *numbers, json.dumps(body), ends]
    )
    try:
        return await _measure(engine, meter, args, num_streams)
    finally:
        clients.kill()
        clients.wait()
        lag.close()


async def _measure(
    engine: AsyncLLMEngine, meter: Meter, args: argparse.Namespace, num_streams: int
) -> dict[str, Any]:
    await _until(lambda: engine.stats().num_running == num_streams)
    await _steps(meter, WARM_UP_STEPS + args.answer_tokens)
    profiler = cProfile.Profile()
    if args.profile:
        profiler.enable()
    meter.reset()
    start_s, cpu_s, all_cpu_s = time.perf_counter(), time.thread_time(), time.process_time()
    await _steps(meter, args.steps)
    wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
    other_cpu_s = time.process_time() - all_cpu_s - cpu_s
    steps, tokens, seconds = meter.steps, meter.tokens, dict(meter.seconds)
    quantiles = meter.quantiles_us()
    lags_s = np.array(meter.lags_s or [0.0])
    if args.profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    num_writes, num_bytes, num_tokens = await _count_writes(meter)
    if not args.answer_tokens:
        assert tokens == steps * num_streams, f"{tokens} tokens in {steps} steps: a stream ended"
    loop_s = cpu_s - sum(seconds[name] for name in PHASES if name != "wake")
    return {
        "streams": num_streams,
        "us_per_step": {n: round(s / steps * 1e6, 1) for n, s in seconds.items()}
        | {"loop": round(loop_s / steps * 1e6, 1)},
        "us_per_token": round(cpu_s / tokens * 1e6, 2),
        "other_threads_us_per_step": round(other_cpu_s / steps * 1e6, 1),
        "step_ms": round(wall_s / steps * 1e3, 3),
        "lag_p50_us": round(float(np.percentile(lags_s, 50)) * 1e6),
        "lag_p99_us": round(float(np.percentile(lags_s, 99)) * 1e6),
        "bytes_per_token": round(num_bytes / num_tokens, 1),
        "writes_per_token": round(num_writes / num_tokens, 3),
        "us_of_steps_p10_50_90_99_100": quantiles,
    }


async def _steps(meter: Meter, number: int) -> None:
    end = meter.steps + number
    await _until(lambda: meter.steps >= end)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (any condition will do)
        await asyncio.sleep(0.01)


async def _count_writes(meter: Meter) -> tuple[int, int, int]:
    """(writes, bytes, tokens) of a few more steps, which are not timed."""
    take = SSEStream._take_pending
    sizes: list[int] = []

    def counting(stream: SSEStream) -> bytes:
        body = take(stream)
        sizes.append(len(b"%x\r\n\r\n" % len(body)) + len(body))
        return body

    meter.reset()
    SSEStream._take_pending = counting  # type: ignore[method-assign, assignment]
    try:
        await _steps(meter, COUNTED_STEPS)
    finally:
        SSEStream._take_pending = take  # type: ignore[method-assign]
    return len(sizes), sum(sizes), meter.tokens


def print_table(rows: list[dict[str, Any]]) -> None:
    phases = [*PHASES, "loop"]
    measured = {
        "us/token": "us_per_token",
        "threads": "other_threads_us_per_step",
        "step ms": "step_ms",
        "lag p50": "lag_p50_us",
        "lag p99": "lag_p99_us",
        "bytes": "bytes_per_token",
        "writes": "writes_per_token",
    }
    print("".join(f"{name:>9}" for name in ("streams", *phases, *measured)))
    for row in rows:
        values = [row["streams"], *(row["us_per_step"][name] for name in phases)]
        values += [row[name] for name in measured.values()]
        print("".join(f"{value:>9}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256, 512])
    parser.add_argument("--steps", type=int, default=400, help="measured, per number of streams")
    parser.add_argument("--device-ms", type=float, default=5.0, help="the device's time per step")
    parser.add_argument("--prefill-ms", type=float, help="of a step with prompt tokens")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--answer-tokens", type=int, default=0, help="0: streams do not end")
    parser.add_argument("--model", default="tiny", help="of whose vocabulary the tokens are")
    parser.add_argument("--profile", action="store_true", help="top functions, on stderr")
    args = parser.parse_args()
    if args.steps > MAX_TOKENS // 2 and not args.answer_tokens:
        parser.error(f"--steps: at most {MAX_TOKENS // 2}")
    SimulatedWorker.step_s = args.device_ms / 1e3
    if args.prefill_ms is not None:
        SimulatedWorker.prefill_step_s = args.prefill_ms / 1e3
    core_loader.Worker = SimulatedWorker  # type: ignore[assignment, attr-defined]
    rows = [
        uvloop.run(measure(args, num_streams))
        for num_streams in tqdm(args.streams, desc="streams", leave=False)
    ]
    print_table(rows)
    conditions = vars(args) | {"python": platform.python_version(), "machine": platform.processor()}
    print(json.dumps({"conditions": conditions, "rows": rows}))


if __name__ == "__main__":
    main()
