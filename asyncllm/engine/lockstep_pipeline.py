"""The order of a step's methods, as in pipeline.py, for engines that run each step together.

    engine 0   | plan N+1 | agree, launch N+1 | wait N | finish N | ...
    engine 1   |   nothing to plan    | agree, launch padding | wait N | ...
    device     |        step N                   |  step N+1  (on all engines)

A step is launched when all engines have agreed on it, while the step before runs. An engine without
work waits until another engine begins a round, and then runs a step of padding only. The
synchronous loop gives the same tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from asyncllm.engine.pipeline import Steps
from asyncllm.step_plan import StepPlan
from asyncllm.types import LaunchedStep, StepResult


@dataclass(eq=False)
class Flight:
    """A launched step. plan None: it is padding only."""

    plan: StepPlan | None
    launched: LaunchedStep

    @cached_property
    def ended(self) -> asyncio.Future[StepResult]:
        """To be used only after `constrain`, if the plan `needs_host`."""
        return asyncio.ensure_future(self.launched.wait())


class LockstepSteps(Steps, Protocol):
    async def lull(self, flight: Flight) -> None:
        """Called if there is nothing to plan. Returns when the step in flight has ended, a request
        has arrived, or another engine has begun a round."""
        ...

    async def launch_together(self, plan: StepPlan | None) -> Flight | None:
        """Agree with the other engines and launch the step, with this plan as this engine's part.
        None: no engine has work."""
        ...

    async def result(self, flight: Flight) -> StepResult:
        """The step's result. Raises if the step does not end, because of whichever engine."""
        ...


async def run_ahead_in_lockstep(steps: LockstepSteps) -> None:
    """Run forever, one step ahead, like `run_ahead`."""
    before: Flight | None = None
    while True:
        if before is not None:
            await steps.wait_to_plan()
        plan = steps.plan()
        if plan is None and before is not None:
            await steps.lull(before)
            plan = steps.plan()
        flight = await steps.launch_together(plan)
        if before is not None:
            _finish(steps, before, await steps.result(before))
        elif flight is None:
            await steps.idle()
        if flight is not None and flight.plan is not None and flight.plan.needs_host:
            await steps.constrain(flight.plan, flight.launched)
        steps.emit()
        before = flight
        await asyncio.sleep(0)


async def run_synchronous_in_lockstep(steps: LockstepSteps) -> None:
    """Run forever, one step at a time, like `run_synchronous`."""
    while True:
        flight = await steps.launch_together(steps.plan())
        if flight is None:
            await steps.idle()
        else:
            if flight.plan is not None:
                await steps.end(flight.plan, flight.launched)
            _finish(steps, flight, await steps.result(flight))
            steps.emit()
        await asyncio.sleep(0)


def _finish(steps: LockstepSteps, flight: Flight, result: StepResult) -> None:
    if flight.plan is not None:
        steps.finish(flight.plan, result)
