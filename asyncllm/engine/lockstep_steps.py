"""The methods of a step, for engines that run each step together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from asyncllm.engine.data_parallel.lockstep import Lockstep, OutOfStepError
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.lockstep_pipeline import Flight
from asyncllm.step_plan import NO_DECODES, StepPlan
from asyncllm.types import StepResult

CHECKS = 8  # of progress, within the time without progress that is an error
NO_WORK = StepPlan(step_id=0, decodes=NO_DECODES, prefills=())

T = TypeVar("T")


class LockstepEngineSteps(EngineSteps):
    """Implements `lockstep_pipeline.LockstepSteps`. patience_seconds: the longest time without a
    completed collective call, while a step or another engine's message is awaited."""

    def __init__(
        self, lockstep: Lockstep, patience_seconds: float, *args: Any, **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        lockstep.wake = self.wake
        self._lockstep, self._patience = lockstep, patience_seconds
        self._lead_seconds = 0.0  # that this host took to plan and launch its last step

    @property
    def lost(self) -> str | None:
        """Which other engine was lost, and why."""
        return self._lockstep.lost

    async def lull(self, flight: Flight) -> None:
        self._work.clear()
        if not self._lockstep.is_begun:
            flight.ended.add_done_callback(lambda _: self.wake())
            await self._work.wait()

    async def launch_together(self, plan: StepPlan | None) -> Flight | None:
        if plan is not None and not plan.num_tokens:  # only swaps, which make no collective calls
            return Flight(plan, self.launch(plan))
        if plan is None and not self._lockstep.is_begun:
            return None
        common_steps = self.worker.common_steps
        step = common_steps.pack(plan or NO_WORK)
        planned_seconds = time.monotonic() - self._plan_started
        agreed = self._lockstep.say(common_steps.need(step), self._lead_seconds)
        said = await self._patiently(agreed, self._who_is_missing)
        start = time.monotonic()
        step = common_steps.pad(step, [each.need for each in said])
        self._lockstep.last = step.common
        flight = Flight(plan, self.worker.launch(plan or NO_WORK, step))
        if plan is None:
            self.clock.idle()
        else:
            self._launched(flight, start, planned_seconds, max(each.lead_seconds for each in said))
        return flight

    def _launched(
        self, flight: Flight, start: float, planned_seconds: float, most_lead_seconds: float
    ) -> None:
        """As in `launch`, but without the time spent waiting for other engines. All engines plan as
        early as the slowest host needs."""
        launch_seconds = time.monotonic() - start
        self._lead_seconds = planned_seconds + launch_seconds
        self.clock.launched(flight.launched, max(self._lead_seconds, most_lead_seconds))
        self._host_seconds["launch"] += launch_seconds
        self._live.scheduler.publish_planned()

    async def result(self, flight: Flight) -> StepResult:
        return await self._patiently(flight.ended, lambda: "a step does not end")

    async def _patiently(self, future: asyncio.Future[T], why: Callable[[], str]) -> T:
        """The future's result. Raises `OutOfStepError` after a time without progress."""
        calls, moved = self.worker.num_calls, time.monotonic()
        while not future.done():
            await asyncio.wait([future], timeout=self._patience / CHECKS)
            if calls != self.worker.num_calls:
                calls, moved = self.worker.num_calls, time.monotonic()
            if not future.done() and time.monotonic() - moved > self._patience:
                raise OutOfStepError(f"{why()} for {self._patience:g} s")
        return future.result()

    def _who_is_missing(self) -> str:
        who = ", ".join(map(str, self._lockstep.missing))
        return f"engine {who} has sent nothing for step {self._lockstep.round}"
