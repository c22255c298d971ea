"""The engine's main loop: when each method of a step is called, and nothing of what it does.

    host   | plan N+1 | launch N+1 | wait N | finish N | wait, HTTP   | plan N+2 | ...
    device |             step N             |          step N+1                  | N+2

`run_ahead` launches step N+1 before the host knows the tokens of step N, so the device never waits
for Python. If rows of step N+1 are sampled only when those tokens are known (`plan.needs_host`),
only its forward pass is launched ahead. Its masks are prepared while the forward pass runs, and its
sampling is launched after them:

    host   | plan N+1 | forward N+1 | wait N | finish N | constrain N+1 | wait | plan N+2 | ...
    device |       step N           |      forward N+1              | sample |   forward N+2

Clients get the tokens of a finished step at once, or while `constrain` waits for masks.

`run_staged` drives a pipeline of stages. Running sequences are divided into as many disjoint row
sets as there are stages, and the sets are planned in turn. A set's next step begins before its
tokens are known. A step has two parts on the first stage, and the steps of the other sets run
between the two (worker/staged_runner.py):

    host   | end A | plan A' | begin A' | wait A | finish A | end B | plan B' | begin B' | ...

`run_synchronous` finishes each step before it plans the next, and is the oracle: all three loops
must produce the same tokens. They are tested with a fake device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from asyncllm.step_plan import StepPlan
from asyncllm.types import LaunchedStep, StepResult


class Steps(Protocol):
    """The methods of a step, in the order of their use. `EngineSteps` implements them."""

    async def wait_to_plan(self) -> None:
        """Return when there is just enough time left to plan and launch the next step."""
        ...

    def plan(self) -> StepPlan | None: ...
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the step to the device; without its sampling if it `needs_host`."""
        ...

    async def constrain(self, plan: StepPlan, launched: LaunchedStep) -> None:
        """Launch the sampling of a step that `needs_host`. All steps before it are finished.

        Calls `emit` while masks are filled, which does not need the GIL.
        """
        ...

    async def end(self, plan: StepPlan, launched: LaunchedStep) -> None:
        """Launch the second part of a step, if it has two. Its set's last step is finished."""
        ...

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        """Append the tokens to their sequences, and end sequences."""
        ...

    def emit(self) -> None:
        """Send the finished step's output to clients, unless `constrain` has done so."""
        ...

    async def idle(self) -> None:
        """Return when there may be something to plan."""
        ...


async def run_ahead(steps: Steps) -> None:
    """Run until cancelled, one step ahead. Raises what a method of `steps` raises."""
    in_flight: tuple[StepPlan, LaunchedStep] | None = None
    while True:
        if in_flight is not None:
            await steps.wait_to_plan()
        plan = steps.plan()
        launched = (plan, steps.launch(plan)) if plan is not None else None
        if in_flight is not None:
            finished, step = in_flight
            steps.finish(finished, await step.wait())
        elif launched is None:
            await steps.idle()
        if launched is not None and launched[0].needs_host:
            await steps.constrain(*launched)
        steps.emit()
        in_flight = launched
        await asyncio.sleep(0)  # other tasks run even if the device never keeps us waiting


async def run_staged(steps: Steps, num_sets: int) -> None:
    """Run until cancelled, with one step of each row set in flight; `plan` takes the sets in
    turn."""
    in_flight: deque[tuple[StepPlan, LaunchedStep] | None] = deque([None] * num_sets)
    while True:
        if (before := in_flight.popleft()) is not None:
            await steps.end(*before)
        plan = steps.plan()
        in_flight.append(None if plan is None else (plan, steps.launch(plan)))
        if before is not None:
            finished, step = before
            steps.finish(finished, await step.wait())
            steps.emit()
        elif not any(in_flight):
            await steps.idle()
        await asyncio.sleep(0)


async def run_synchronous(steps: Steps) -> None:
    """Run until cancelled, one step at a time: the oracle for the other two loops."""
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
