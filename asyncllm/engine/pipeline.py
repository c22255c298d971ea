"""The time structure of the engine: when each verb of a step is called, and not what it does.

    one ahead     host   | plan N+1 | launch N+1 | wait N | finish N | wait, HTTP   | plan N+2 | ...
                  device |             step N             |          step N+1                  | N+2

`run_ahead` launches step N+1 before step N's tokens are known on the host, so the device never
waits for Python. Where rows of step N+1 need those tokens to be sampled (`plan.needs_host`), only
its forward pass is launched ahead; its sampling follows, prepared while the forward runs:

    host   | plan N+1 | forward N+1 | wait N | finish N | constrain N+1 | wait | plan N+2 | ...
    device |       step N           |      forward N+1              | sample |   forward N+2

Clients get a finished step's tokens at once, or, where the next one must be constrained, meanwhile.

`run_staged` is for a pipeline of stages: each step has two parts on the device, and belongs to one
of as many row sets, which are disjoint and planned in turns. Between a step's parts, those of the
other sets are at work (staged_runner.py); a set's next step is begun before its tokens are known.

    host   | end A | plan A' | begin A' | wait A | finish A | end B | plan B' | begin B' | ...

`run_synchronous`, their twin, finishes each step before it plans the next. They must give the same
tokens. All are tested with a fake device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from asyncllm.step_plan import StepPlan
from asyncllm.types import StepResult


class Launched(Protocol):
    """A step that the device has been given, all of it or its forward pass."""

    async def wait(self) -> StepResult:
        """Its tokens. Never blocks the event loop; raises what the device raised."""
        ...


class Steps(Protocol):
    """The verbs of one step, in the order of their use."""

    async def wait_to_plan(self) -> None:
        """Return when the step in flight leaves just the time to plan and launch the next."""
        ...

    def plan(self) -> StepPlan | None: ...
    def launch(self, plan: StepPlan) -> Launched:
        """Give the step to the device; without its sampling if it `needs_host`."""
        ...

    async def constrain(self, plan: StepPlan, launched: Launched) -> None:
        """Launch the sampling of a step that `needs_host`; all steps before are finished.

        It calls `emit` when nothing more can be done for the device.
        """
        ...

    async def end(self, plan: StepPlan, launched: Launched) -> None:
        """Launch what is left of a step that has two parts; its set's step before is finished."""
        ...

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        """Take its tokens."""
        ...

    def emit(self) -> None:
        """Give the clients what was finished, if they have not got it yet."""
        ...

    async def idle(self) -> None:
        """Return when there may be something to plan."""
        ...


async def run_ahead(steps: Steps) -> None:
    """Run for ever, one step ahead. Ends by cancellation or by what a verb raises."""
    in_flight: tuple[StepPlan, Launched] | None = None
    while True:
        if in_flight is not None:
            await steps.wait_to_plan()
        plan = steps.plan()
        launched = (plan, steps.launch(plan)) if plan is not None else None
        if in_flight is not None:
            before, device_work = in_flight
            steps.finish(before, await device_work.wait())
        elif launched is None:
            await steps.idle()
        if launched is not None and launched[0].needs_host:
            await steps.constrain(*launched)
        steps.emit()
        in_flight = launched
        await asyncio.sleep(0)  # even where the device is never behind, HTTP gets its turn


async def run_staged(steps: Steps, num_sets: int) -> None:
    """Run for ever, a step of each set in flight. Ends as `run_ahead`. num_sets: that `plan` takes
    in turns."""
    in_flight: deque[tuple[StepPlan, Launched] | None] = deque([None] * num_sets)
    while True:
        if (before := in_flight.popleft()) is not None:
            await steps.end(*before)
        plan = steps.plan()
        in_flight.append(None if plan is None else (plan, steps.launch(plan)))
        if before is not None:
            ended, device_work = before
            steps.finish(ended, await device_work.wait())
            steps.emit()
        elif not any(in_flight):
            await steps.idle()
        await asyncio.sleep(0)


async def run_synchronous(steps: Steps) -> None:
    """Run for ever, one step at a time: the oracle for `run_ahead`."""
    while True:
        plan = steps.plan()
        if plan is not None:
            launched = steps.launch(plan)
            await steps.end(plan, launched)
            steps.finish(plan, await launched.wait())
            steps.emit()
        else:
            await steps.idle()
        await asyncio.sleep(0)
