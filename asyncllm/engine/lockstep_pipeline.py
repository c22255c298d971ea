"""The time structure of engines that do each step together, as pipeline.py has one engine's.

    engine 0   | plan N+1 | agree, launch N+1 | wait N | finish N | ...
    engine 1   |   nothing to plan    | agree, launch padding | wait N | ...
    device     |        step N                   |  step N+1  (all of them)

A step is launched when all engines have agreed on it, while the one before runs. An engine without
work does it with padding alone: its loop waits until another engine wants a step, and is in step
with it from then on. The synchronous twin gives the same tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from asyncllm.engine.pipeline import Launched, Steps
from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult


@dataclass(eq=False)
class Flight:
    """A step that was launched; plan None: it is padding alone."""

    plan: StepPlan | None
    launched: Launched

    @cached_property
    def ended(self) -> asyncio.Future[StepResult]:
        """Not before a plan that `needs_host` was constrained."""
        return asyncio.ensure_future(self.launched.wait())


class LockstepSteps(Steps, Protocol):
    async def lull(self, flight: Flight) -> None:
        """There is nothing to plan: return when the step in flight has ended, a request has come or
        another engine wants a step."""
        ...

    async def launch_together(self, plan: StepPlan | None) -> Flight | None:
        """Launch the step that all engines agree on, and this plan as this one's part of it. None:
        none of them has work."""
        ...

    async def result(self, flight: Flight) -> StepResult:
        """Its end. Raises also where another engine keeps it from ending."""
        ...


async def run_ahead_in_lockstep(steps: LockstepSteps) -> None:
    """As `run_ahead`."""
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
    """As `run_synchronous`."""
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
