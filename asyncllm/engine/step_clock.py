"""Where a step's time goes: on the device, on the host, and in waiting for each other.

    host    launch N+1 |..............lead of N+1..............| sees N
    device        step N                                       | step N+1

The device's begin and end of a step come from the executor (CUDA events, or the CPU thread's own
clock), never from a synchronisation. The launch lead is what is left of step N when step N+1 has
been launched; below zero the device had to wait. Steps end in the order of their launch, so a queue
joins the two. Idleness (nothing to plan) ends the comparison between neighbours. `LoopLag` measures
what holds the loop itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncllm.engine.stats import StepKind, StepRecord
from asyncllm.step_plan import StepPlan
from asyncllm.worker.executor import LaunchedStep

LAG_INTERVAL_S = 0.05


@dataclass(slots=True)
class HostSeconds:
    """Wall time in each verb of a step, in all: the loop's, but for `constrain`, a thread's."""

    plan: float = 0.0
    launch: float = 0.0
    finish: float = 0.0
    constrain: float = 0.0


class StepClock:
    def __init__(self) -> None:
        self.host = HostSeconds()
        self._in_flight: deque[tuple[LaunchedStep, float]] = deque()  # (step, launched at)
        self._last_end: float | None = None  # on the device, of the step before

    def launched(self, step: LaunchedStep) -> None:
        """The step has been given to the device just now."""
        self._in_flight.append((step, time.monotonic()))

    def finished(self, plan: StepPlan) -> StepRecord:
        """The oldest step in flight, `plan`, is over."""
        step, launched_at = self._in_flight.popleft()
        times, before = step.device_times(), self._last_end
        num_prefill = sum(len(row.token_ids) for row in plan.prefills)
        self._last_end = times.ended
        return StepRecord(
            step_id=plan.step_id,
            kind=kind_of(plan),
            rows=len(plan.decodes) + len(plan.prefills),
            tokens=len(plan.decodes) + num_prefill,
            prefill_tokens=num_prefill,
            start=times.started,
            duration=max(times.ended - times.started, 0.0),
            launch_lead=None if before is None else before - launched_at,
            starved=0.0 if before is None else max(times.started - before, 0.0),
            num_swap_out=len(plan.swap_out),
            num_swap_in=len(plan.swap_in),
        )

    def idle(self) -> None:
        """There is nothing to plan: the time until the next launch is nobody's fault."""
        self._last_end = None

    def reset(self) -> None:
        """Forget what is in flight: it failed."""
        self._in_flight.clear()
        self._last_end = None


def kind_of(plan: StepPlan) -> StepKind:
    if not plan.prefills:
        return "decode" if plan.decodes else "swap"
    return "mixed" if plan.decodes else "prefill"


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
