"""Measures where a first token's time goes: stamps each request on its path through the server.

One client, in a process of its own, sends requests one after the other (or --burst of them at
once) over the loopback. The stages in microseconds, each from the end of the stage before, as
medians and as lower quintiles, which a busy machine disturbs less:

  receive   the client's send to the server's sight of its bytes
  parse     HTTP, JSON, checks, tokens, queueing: until the engine has the request
  wake      until the step that computes its last prompt token is planned
  launch    planning that step and giving it to the device
  device    until the device is done with it
  notice    until the engine is told so
  emit      the scheduler's books, text, frames: until the transport has the first frame
  deliver   until the client has read it

With --running others stream meanwhile; then gap is the time between the ends of two steps, as the
engine sees them: what a running stream waits for its next token.

The device is simulated: a step takes --prefill-ms or --decode-ms, and its launch keeps the loop for
--host-us, as Python does between captured pieces. With --real the model runs. Both processes read
the machine's monotonic clock. Ends in a JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import uvloop
from simulated_worker import SimulatedWorker, running_server

from asyncllm.config import EngineArgs
from asyncllm.engine import core_loader
from asyncllm.engine.engine_core import EngineCore
from asyncllm.server.http.connection import Connection
from asyncllm.server.http.sse import SSEStream
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, StepResult

STAGES = ("receive", "parse", "wake", "launch", "device", "notice", "emit", "deliver")
CLIENT = Path(__file__).with_name("bench_clients.py")
NUM_WARM_UP = 5  # requests


class Stamps:
    """The server's times of each request, in the order of arrival; seconds, monotonic."""

    def __init__(self, core: EngineCore) -> None:
        self.received: deque[float] = deque()  # of requests that are not queued yet
        self.rows: list[list[float]] = []  # received, queued, planned, launched, ended, seen, sent
        self._open: dict[str, list[float]] = {}
        self.gaps: list[list[float]] = []  # [end of a step, end of the next]
        self._last_end = 0.0
        self._in_flight: deque[list[list[float]]] = deque()  # rows whose first token a step samples
        self._unsent: deque[list[float]] = deque()
        self._watch_engine(core)
        self._watch_connections()

    def _watch_engine(self, core: EngineCore) -> None:
        steps, add = core.steps, core.live.scheduler.add
        launch, finish, clock = steps.launch, steps.finish, steps.clock
        end_of = clock.finished
        seen_rows: deque[tuple[float, list[list[float]]]] = deque()  # until their steps' ends are

        def adding(request: Request) -> None:
            row = [self.received.popleft(), time.monotonic()]
            self.rows.append(row)
            self._open[request.request_id] = row
            add(request)

        def launching(plan: StepPlan) -> Any:
            rows = [self._open.pop(r.seq.request.request_id) for r in plan.prefills if r.samples]
            started = steps._plan_started
            launched = launch(plan)
            for row in rows:
                row += [started, time.monotonic()]
            self._in_flight.append(rows)
            return launched

        def ending(plan: StepPlan) -> Any:
            record = end_of(plan)
            seen, rows = seen_rows.popleft()
            for row in rows:  # their frames may be sent already
                row[4:4] = [record.start + record.duration, seen]
            return record

        def finishing(plan: StepPlan, result: StepResult) -> None:
            seen = time.monotonic()
            self.gaps.append([self._last_end, seen])
            self._last_end = seen
            rows = self._in_flight.popleft()
            self._unsent += rows
            seen_rows.append((seen, rows))
            finish(plan, result)

        core.live.scheduler.add = adding  # type: ignore[method-assign]
        steps.launch = launching  # type: ignore[method-assign]
        clock.finished = ending  # type: ignore[method-assign]
        steps.finish = finishing  # type: ignore[method-assign]

    def _watch_connections(self) -> None:
        receive, take = Connection.data_received, SSEStream._take_pending

        def receiving(connection: Connection, data: bytes) -> None:
            if data.startswith(b"POST "):
                self.received.append(time.monotonic())
            receive(connection, data)

        def taking(stream: SSEStream) -> bytes:
            body = take(stream)
            if self._unsent:
                self._unsent.popleft().append(time.monotonic())
            return body

        Connection.data_received = receiving  # type: ignore[assignment, method-assign]
        SSEStream._take_pending = taking  # type: ignore[assignment, method-assign]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    engine_args = EngineArgs(args.model, load_format=args.load_format, max_num_batched_tokens=8192)
    async with running_server(engine_args) as (engine, _, port):
        core = engine._running()
        assert isinstance(core, EngineCore)
        stamps = Stamps(core)
        client = await asyncio.create_subprocess_exec(
            sys.executable, str(CLIENT), "first-token", str(port), str(args.requests + NUM_WARM_UP),
            str(args.burst), str(args.input_len), str(args.output_len), str(args.running),
            stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            output, _ = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
    seen = json.loads(output)  # per request: sent, first byte read
    skipped = NUM_WARM_UP * args.burst
    stamped = stamps.rows[args.running :]
    rows = [[sent, *row, read] for (sent, read), row in zip(seen, stamped, strict=True)][skipped:]
    began = rows[0][0]
    gaps = [end - start for start, end in stamps.gaps if args.running and start > began]
    return summary(rows, gaps)


def summary(rows: list[list[float]], gaps: list[float]) -> dict[str, dict[str, float]]:
    """stage -> its quantiles; "total" is the time to the first token."""
    spans = {name: [row[i + 1] - row[i] for row in rows] for i, name in enumerate(STAGES)}
    spans["total"] = [row[-1] - row[0] for row in rows]
    if gaps:
        spans["gap"] = gaps
    shares = {"p20": 0.2, "p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        name: {p: round(sorted(span)[int(q * len(span))] * 1e6, 1) for p, q in shares.items()}
        for name, span in spans.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--real", action="store_true", help="run the model, not the simulation")
    parser.add_argument("--requests", type=int, default=100, help="measured, or bursts of them")
    parser.add_argument("--burst", type=int, default=1, help="requests sent at once")
    parser.add_argument("--running", type=int, default=0, help="streams that go on meanwhile")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--prefill-ms", type=float, default=1.4)
    parser.add_argument("--decode-ms", type=float, default=0.9)
    parser.add_argument(
        "--host-us", type=float, nargs=2, default=(700, 150), metavar=("PREFILL", "DECODE")
    )
    args = parser.parse_args()
    if not args.real:
        SimulatedWorker.step_s = args.decode_ms / 1e3
        SimulatedWorker.prefill_step_s = args.prefill_ms / 1e3
        SimulatedWorker.prefill_host_s, SimulatedWorker.decode_host_s = (
            us / 1e6 for us in args.host_us
        )
        core_loader.Worker = SimulatedWorker  # type: ignore[assignment, attr-defined]
    result = uvloop.run(measure(args))
    print(f"{'':12}{'p20':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, us in result.items():
        print(f"{name:12}" + "".join(f"{value:10.1f}" for value in us.values()))
    print(json.dumps({"conditions": vars(args), "us": result}))


if __name__ == "__main__":
    main()
