"""The time structure: the order of the verbs, who gets a turn meanwhile, and how it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncllm.engine.pipeline import Steps, run_ahead, run_staged, run_synchronous
from asyncllm.step_plan import NO_DECODES, StepPlan
from asyncllm.types import LaunchedStep, Sequence, StepResult
from tests.engine.builders import make_request, make_scheduler
from tests.engine.fake_device import FakeDevice, FakeLaunched

Pipeline = Callable[[Steps], Coroutine[Any, Any, None]]
BOTH = pytest.mark.parametrize("pipeline", [run_ahead, run_synchronous])


class Done(Exception):
    """The script is at its end."""


class Boom(Exception):
    """A verb failed."""


class Script:
    """Plans steps 1, 2, ... as written (None: nothing to plan) and notes each verb in `log`."""

    def __init__(
        self,
        steps: list[int | None],
        *,
        wait_turns: int = 0,
        fail_at: str = "",
        host_steps: tuple[int, ...] = (),
    ) -> None:
        self.log: list[str] = []
        self.pending_emit: list[int] = []
        self.wait_turns = wait_turns
        self._steps = list(steps)
        self._host_steps = host_steps
        self._fail_at = fail_at

    def note(self, event: str) -> None:
        self.log.append(event)
        if event == self._fail_at:
            raise Boom(event)

    def plan(self) -> StepPlan | None:
        step_id = self._steps.pop(0) if self._steps else None
        if step_id is None:
            return None
        self.note(f"plan {step_id}")
        decodes = replace(NO_DECODES, needs_host=step_id in self._host_steps)
        return StepPlan(step_id=step_id, decodes=decodes, prefills=())

    def launch(self, plan: StepPlan) -> ScriptLaunched:
        self.note(f"launch {plan.step_id}")
        return ScriptLaunched(self, plan.step_id)

    async def constrain(self, plan: StepPlan, launched: LaunchedStep) -> None:
        await asyncio.sleep(0)
        self.note(f"constrain {plan.step_id}")
        self.emit()

    async def end(self, plan: StepPlan, launched: LaunchedStep) -> None:
        if plan.needs_host:
            await self.constrain(plan, launched)

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        assert result.token_ids == [plan.step_id], "the result of another step"
        self.note(f"finish {plan.step_id}")
        self.pending_emit.append(plan.step_id)

    def emit(self) -> None:
        assert len(self.pending_emit) <= 1, "a step is told before the next is finished"
        if self.pending_emit:
            self.note(f"emit {self.pending_emit.pop()}")

    async def wait_to_plan(self) -> None:
        pass

    async def idle(self) -> None:
        self.note("idle")
        if not self._steps:
            raise Done


class ScriptLaunched:
    def __init__(self, script: Script, step_id: int) -> None:
        self._script, self._step_id = script, step_id

    async def wait(self) -> StepResult:
        for _ in range(self._script.wait_turns):
            await asyncio.sleep(0)
        self._script.note(f"wait {self._step_id}")
        return StepResult([self._step_id])


def run(pipeline: Pipeline, script: Script) -> list[str]:
    with pytest.raises(Done):
        asyncio.run(pipeline(script))
    return script.log


class StagedScript(Script):
    """Every step has two parts."""

    async def end(self, plan: StepPlan, launched: LaunchedStep) -> None:
        self.note(f"end {plan.step_id}")


# --- order ---------------------------------------------------------------------------------------


def test_one_step_is_launched_before_the_one_before_is_awaited() -> None:
    assert run(run_ahead, Script([1, 2, 3])) == [
        "plan 1", "launch 1",
        "plan 2", "launch 2", "wait 1", "finish 1", "emit 1",
        "plan 3", "launch 3", "wait 2", "finish 2", "emit 2",
        "wait 3", "finish 3", "emit 3",
        "idle",
    ]  # fmt: skip


def test_a_step_of_each_set_of_a_pipeline_is_in_flight() -> None:
    assert run(partial(run_staged, num_sets=2), StagedScript([1, 2, 3, None, 4])) == [
        "plan 1", "launch 1",
        "plan 2", "launch 2",
        "end 1", "plan 3", "launch 3", "wait 1", "finish 1", "emit 1",
        "end 2", "wait 2", "finish 2", "emit 2",
        "end 3", "plan 4", "launch 4", "wait 3", "finish 3", "emit 3",
        "end 4", "wait 4", "finish 4", "emit 4",
        "idle",
    ]  # fmt: skip


def test_it_waits_to_plan_only_while_a_step_is_in_flight() -> None:
    class Lingering(Script):
        async def wait_to_plan(self) -> None:
            self.note("wait_to_plan")

    assert run(run_ahead, Lingering([1, 2, None, 3])) == [
        "plan 1", "launch 1",
        "wait_to_plan", "plan 2", "launch 2", "wait 1", "finish 1", "emit 1",
        "wait_to_plan", "wait 2", "finish 2", "emit 2",
        "plan 3", "launch 3",
        "wait_to_plan", "wait 3", "finish 3", "emit 3",
        "idle",
    ]  # fmt: skip


def test_a_step_with_host_rows_is_sampled_when_the_one_before_is_known() -> None:
    assert run(run_ahead, Script([1, 2, 3, 4, None], host_steps=(1, 3, 4))) == [
        "plan 1", "launch 1", "constrain 1",
        "plan 2", "launch 2", "wait 1", "finish 1", "emit 1",
        "plan 3", "launch 3", "wait 2", "finish 2", "constrain 3", "emit 2",
        "plan 4", "launch 4", "wait 3", "finish 3", "constrain 4", "emit 3",
        "wait 4", "finish 4", "emit 4",
        "idle",
    ]  # fmt: skip
    assert run(run_synchronous, Script([1, 2], host_steps=(2,))) == [
        "plan 1", "launch 1", "wait 1", "finish 1", "emit 1",
        "plan 2", "launch 2", "constrain 2", "wait 2", "finish 2", "emit 2",
        "idle",
    ]  # fmt: skip


def test_the_synchronous_twin_does_one_after_the_other() -> None:
    assert run(run_synchronous, Script([1, 2])) == [
        "plan 1", "launch 1", "wait 1", "finish 1", "emit 1",
        "plan 2", "launch 2", "wait 2", "finish 2", "emit 2",
        "idle",
    ]  # fmt: skip


def test_a_step_in_flight_is_finished_before_the_pipeline_idles() -> None:
    log = run(run_ahead, Script([1, None, 2, None, None]))
    assert log == [
        "plan 1", "launch 1",
        "wait 1", "finish 1", "emit 1",
        "plan 2", "launch 2",
        "wait 2", "finish 2", "emit 2",
        "idle",
    ]  # fmt: skip


@BOTH
def test_after_idling_it_goes_on(pipeline: Pipeline) -> None:
    log = run(pipeline, Script([None, 1, None, None, 2]))
    assert log[0] == log[-1] == "idle" and "idle" in log[1:-1]
    assert log.index("finish 1") < log.index("plan 2") < log.index("finish 2")


# --- turns of others -----------------------------------------------------------------------------


@BOTH
def test_others_get_a_turn_in_each_step_of_a_fast_device(pipeline: Pipeline) -> None:
    script = Script(list(range(1, 51)))

    async def other() -> None:
        while True:
            script.log.append("turn")
            await asyncio.sleep(0)

    async def both() -> None:
        task = asyncio.create_task(other())
        try:
            await pipeline(script)
        finally:
            task.cancel()

    with pytest.raises(Done):
        asyncio.run(both())
    assert script.log.count("turn") >= 49


@BOTH
def test_an_idle_that_returns_at_once_does_not_lock_others_out(pipeline: Pipeline) -> None:
    script = Script([None] * 1_000)

    async def first_turn_of_another() -> int:
        task = asyncio.create_task(pipeline(script))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        return script.log.count("idle")

    assert asyncio.run(first_turn_of_another()) < 10


# --- ends ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "verb", ["plan 2", "launch 2", "constrain 2", "wait 2", "finish 2", "emit 2", "idle"]
)
def test_what_a_verb_raises_comes_out(pipeline: Pipeline, verb: str) -> None:
    script = Script([1, 2, 3], fail_at=verb, host_steps=(2,))
    with pytest.raises(Boom, match=verb):
        asyncio.run(pipeline(script))
    assert script.log[-1] == verb, "nothing is done after it"


@BOTH
def test_cancelling_ends_it_while_it_waits(pipeline: Pipeline) -> None:
    script = Script([1, 2, 3], wait_turns=1_000_000)

    async def cancel_soon() -> None:
        task = asyncio.create_task(pipeline(script))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_soon())
    assert "wait 1" not in script.log and "launch 1" in script.log


# --- with the real scheduler and the fake device -------------------------------------------------


class SmallEngine:
    def __init__(self, lazy: bool, num_sets: int = 1) -> None:
        self.scheduler = make_scheduler(
            num_pages=12, block_size=2, num_host_pages=4, num_sets=num_sets
        )
        self.device = FakeDevice(
            num_pages=12,
            num_host_pages=4,
            block_size=2,
            max_num_seqs=4,
            rng=random.Random(0),
            lazy=lazy,
            in_parts=num_sets > 1,
        )

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan()

    def launch(self, plan: StepPlan) -> FakeLaunched:
        return self.device.launch(plan)

    def finish(self, plan: StepPlan, result: StepResult) -> None:
        self.scheduler.finish_step(plan, result)

    def emit(self) -> None:
        pass

    async def constrain(self, plan: StepPlan, launched: LaunchedStep) -> None:
        raise AssertionError("no row needs the host")

    async def end(self, plan: StepPlan, launched: LaunchedStep) -> None:
        assert isinstance(launched, FakeLaunched)
        if self.device.in_parts:
            launched.sample(np.zeros(0, np.int32))

    async def wait_to_plan(self) -> None:
        pass

    async def idle(self) -> None:
        self.scheduler.check_empty()
        raise Done


def texts(pipeline: Pipeline, lazy: bool, num_sets: int = 1) -> list[list[int]]:
    engine = SmallEngine(lazy, num_sets)
    sequences: list[Sequence] = []
    for number in range(6):
        request = make_request(number, range(number % 3 + 1), n=number % 2 + 1, max_tokens=12)
        sequences += request.sequences
        engine.scheduler.add(request)
    with pytest.raises(Done):
        asyncio.run(pipeline(engine))
    return [seq.token_ids for seq in sequences]


def test_both_pipelines_give_the_same_tokens() -> None:
    expected = texts(run_synchronous, lazy=False)
    assert len({tuple(text) for text in expected}) == len(expected) == 9
    assert texts(run_ahead, lazy=False) == texts(run_ahead, lazy=True) == expected
    for num_sets in (2, 4):
        staged = partial(run_staged, num_sets=num_sets)
        assert texts(staged, lazy=False, num_sets=num_sets) == expected
        assert texts(staged, lazy=True, num_sets=num_sets) == expected
