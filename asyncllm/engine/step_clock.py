"""Measures where a step's time goes: on the device, on the host, and in waiting for each other.

    host    launch N+1 |..............lead of N+1..............| sees N
    device        step N                                       | step N+1

The start and end of a step come from the executor (CUDA events, or the clock of the CPU's thread),
never from a synchronisation. The launch lead is the rest of step N when step N+1 has been launched;
if it is negative, the device had to wait. Steps end in the order of their launch, so a queue
matches the two. An idle time (nothing to plan) resets the comparison. `LoopLag` measures how long
callbacks block the event loop.

These times also tell when to plan the next step: late, so that new requests are in it.

    device   |        step N         |          step N+1             |
    plan at once    ^ N+1: a later request waits for step N+2, one step more
    plan late                  ^ N+1, a lead before the expected end of N

The expected end is a lower bound, so that the device never waits: every forward pass reads all
weights, as the last decode steps did, and it is at least SHORTEST times the quickest of them. So
one slow step delays nothing, and no wait is longer than MOST_SECONDS. The lead is the time that
the host lately took to plan and launch, and the time to wake up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from asyncllm.engine.stats import StepRecord
from asyncllm.step_plan import StepKind, StepPlan
from asyncllm.types import LaunchedStep

LAG_INTERVAL_S = 0.05
SHORTEST = 0.97  # relative to the quickest of the last NUM_STEPS decode steps
NUM_STEPS = 8
MOST_SECONDS = 0.05
WAKE_SECONDS = 0.4e-3  # the loop may be busy
FORGET = 0.9  # decay per step of the longest time that the host took to plan and launch


class StepClock:
    def __init__(self) -> None:
        self._in_flight: deque[tuple[LaunchedStep, float]] = deque()  # (step, launched at)
        self._last_end: float | None = None  # when the step before ended on the device
        self._decode_seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._lead_seconds = 0.0  # that the host took lately to plan and launch

    def launched(self, step: LaunchedStep, host_seconds: float) -> None:
        """A step was launched now. host_seconds: the time to plan and launch it."""
        self._in_flight.append((step, time.monotonic()))
        self._lead_seconds = max(host_seconds, self._lead_seconds * FORGET)

    def finished(self, plan: StepPlan) -> StepRecord:
        """The oldest step in flight, `plan`, is finished."""
        step, launched_at = self._in_flight.popleft()
        times, before = step.device_times(), self._last_end
        num_decodes, num_tokens = len(plan.decodes), plan.num_tokens
        self._last_end, duration = times.ended, max(times.ended - times.started, 0.0)
        kind = StepKind.of(num_decodes, num_tokens - num_decodes)
        if kind is StepKind.DECODE:
            self._decode_seconds.append(duration)
        return StepRecord(
            step_id=plan.step_id,
            kind=kind,
            rows=num_decodes + len(plan.prefills),
            tokens=num_tokens,
            prefill_tokens=num_tokens - num_decodes,
            start=times.started,
            duration=duration,
            launch_lead=None if before is None else before - launched_at,
            starved=0.0 if before is None else max(times.started - before, 0.0),
            num_swap_out=len(plan.swap_out),
            num_swap_in=len(plan.swap_in),
        )

    def seconds_to_plan(self, now: float) -> float:
        """How long to wait before the next plan. now: monotonic seconds."""

        if self._last_end is None:
            return 0.0
        lead = WAKE_SECONDS + self._lead_seconds
        due = self._last_end + SHORTEST * min(self._decode_seconds, default=0.0) - lead
        return min(max(due - now, 0.0), MOST_SECONDS)

    def idle(self) -> None:
        """There is nothing to plan: the device's idle time until the next launch does not count."""
        self._last_end = None

    def reset(self) -> None:
        """Forget the steps in flight, after a failure."""
        self._in_flight.clear()
        self._last_end = None


class LoopLag:
    """Measures the event loop's lag with a timer while steps run, and passes it to `observe`, in s.

    A callback that blocks the loop delays all streams. The lag shows it, whether it is ours, an
    HTTP handler's or the application's. uvloop's timers have a resolution of 1 ms and may fire
    early, so lags below 1 ms read as zero. Must be created on its loop.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Start a measurement, unless one is running; called once per step."""
        if self._timer is None:
            due = time.monotonic() + LAG_INTERVAL_S
            self._timer = self._loop.call_later(LAG_INTERVAL_S, self._fire, due)

    def _fire(self, due: float) -> None:
        self._timer = None
        self._observe(max(time.monotonic() - due, 0.0))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
