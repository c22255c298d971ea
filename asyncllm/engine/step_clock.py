"""Where a step's time goes: on the device, on the host, and in waiting for each other.

    host    launch N+1 |..............lead of N+1..............| sees N
    device        step N                                       | step N+1

The device's begin and end of a step come from the executor (CUDA events, or the CPU thread's own
clock), never from a synchronisation. The launch lead is what is left of step N when step N+1 has
been launched; below zero the device had to wait. Steps end in the order of their launch, so a queue
joins the two. Idleness (nothing to plan) ends the comparison between neighbours. `LoopLag` measures
what holds the loop itself.

From these times follows when to plan: late, so that a request that arrives meanwhile is in it.

    device   |        step N         |          step N+1             |
    plan at once    ^ N+1: an arrival from here on waits for step N+2, a whole step more
    plan late                  ^ N+1, a lead before the expected end of N

The expected end is a floor, so that the device is not kept waiting: every forward pass reads all
weights, as the last steps of decodes did, and SHORTEST says how much less than the quickest of them
it may take. One slow step therefore delays nothing, and no wait is longer than MOST_SECONDS.
The lead is what the host then needs: to plan and launch, as it lately took, and to wake up.
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
SHORTEST = 0.97  # of the quickest of the last NUM_STEPS decode steps
NUM_STEPS = 8
MOST_SECONDS = 0.05
WAKE_SECONDS = 0.4e-3  # the loop may be at work
FORGET = 0.9  # per step, of the longest time that the host took to plan and launch


class StepClock:
    def __init__(self) -> None:
        self._in_flight: deque[tuple[LaunchedStep, float]] = deque()  # (step, launched at)
        self._last_end: float | None = None  # on the device, of the step before
        self._decode_seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._lead_seconds = 0.0  # that the host lately took to plan and launch

    def launched(self, step: LaunchedStep, host_seconds: float) -> None:
        """The step has been given to the device just now; to plan and launch it took so long."""
        self._in_flight.append((step, time.monotonic()))
        self._lead_seconds = max(host_seconds, self._lead_seconds * FORGET)

    def finished(self, plan: StepPlan) -> StepRecord:
        """The oldest step in flight, `plan`, is over."""
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
        """From `now` until the next plan should be made; 0 where at once.

        now: monotonic seconds.
        """
        if self._last_end is None:
            return 0.0
        lead = WAKE_SECONDS + self._lead_seconds
        due = self._last_end + SHORTEST * min(self._decode_seconds, default=0.0) - lead
        return min(max(due - now, 0.0), MOST_SECONDS)

    def idle(self) -> None:
        """There is nothing to plan: the time until the next launch is nobody's fault."""
        self._last_end = None

    def reset(self) -> None:
        """Forget what is in flight: it failed."""
        self._in_flight.clear()
        self._last_end = None


class LoopLag:
    """Calls `observe` with each lag in seconds, by a timer while steps run, and none when idle.

    A callback that holds the loop for long delays every stream at once; this shows it whoever did
    it, HTTP handlers and the embedding application included. uvloop's timers tick in milliseconds
    and may fire up to one early, so lags under a millisecond read as zero. Made on its loop.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Sample once more; called once per step."""
        if self._timer is None:
            due = time.monotonic() + LAG_INTERVAL_S
            self._timer = self._loop.call_later(LAG_INTERVAL_S, self._fire, due)

    def _fire(self, due: float) -> None:
        self._timer = None
        self._observe(max(time.monotonic() - due, 0.0))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
