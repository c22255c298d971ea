"""The verbs of a step on the real parts, where several engines do each step together."""

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

LOOKS = 8  # in the time after which who stands still is lost
NOTHING = StepPlan(step_id=0, decodes=NO_DECODES, prefills=())

T = TypeVar("T")


class LockstepEngineSteps(EngineSteps):
    """Implements `lockstep_pipeline.LockstepSteps`. patience_seconds: for which no call between
    ranks may have ended while a step, or a word of another engine, is waited for."""

    def __init__(
        self, lockstep: Lockstep, patience_seconds: float, *args: Any, **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        lockstep.wake = self.wake
        self._lockstep, self._patience = lockstep, patience_seconds
        self._own_lead_seconds = 0.0  # that the last step's plan and launch took here

    @property
    def lost(self) -> str | None:
        """The other engine that is lost, and why."""
        return self._lockstep.lost

    async def lull(self, flight: Flight) -> None:
        self._work.clear()
        if not self._lockstep.is_begun:
            flight.ended.add_done_callback(lambda _: self.wake())
            await self._work.wait()

    async def launch_together(self, plan: StepPlan | None) -> Flight | None:
        if plan is not None and not plan.num_tokens:  # swaps alone, which others need not know of
            return Flight(plan, self.launch(plan))
        if plan is None and not self._lockstep.is_begun:
            return None
        common_steps = self.worker.common_steps
        step = common_steps.pack(plan or NOTHING)
        planned_seconds = time.monotonic() - self._plan_started
        words = self._lockstep.say(common_steps.need(step), self._own_lead_seconds)
        said = await self._patiently(words, self._who_is_missing)
        start = time.monotonic()
        step = common_steps.pad(step, [each.need for each in said])
        self._lockstep.last = step.common
        flight = Flight(plan, self.worker.launch(plan or NOTHING, step))
        if plan is None:
            self.clock.idle()
        else:
            self._launched(flight, start, planned_seconds, max(each.lead_seconds for each in said))
        return flight

    def _launched(
        self, flight: Flight, start: float, planned_seconds: float, most_lead_seconds: float
    ) -> None:
        """As `launch`, but that the time that others took is not this engine's; all plan as early
        as the slowest of them has to."""
        launch_seconds = time.monotonic() - start
        self._own_lead_seconds = planned_seconds + launch_seconds
        lead = max(self._own_lead_seconds, most_lead_seconds)
        self.clock.launched(flight.launched, lead)
        self._host_seconds["launch"] += launch_seconds
        self._live.scheduler.publish_planned()

    async def result(self, flight: Flight) -> StepResult:
        return await self._patiently(flight.ended, lambda: "a step does not end")

    async def _patiently(self, future: asyncio.Future[T], why: Callable[[], str]) -> T:
        """Its result. Raises `OutOfStepError` where nothing moves for so long."""
        calls, moved = self.worker.num_calls, time.monotonic()
        while not future.done():
            await asyncio.wait([future], timeout=self._patience / LOOKS)
            if calls != self.worker.num_calls:
                calls, moved = self.worker.num_calls, time.monotonic()
            if not future.done() and time.monotonic() - moved > self._patience:
                raise OutOfStepError(f"{why()} for {self._patience:g} s")
        return future.result()

    def _who_is_missing(self) -> str:
        who = ", ".join(map(str, self._lockstep.missing))
        return f"engine {who} says nothing of step {self._lockstep.round}"
