"""When the next step is planned: a lead before the step in flight can be over, never later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from asyncllm.engine.step_clock import (
    FORGET,
    MOST_SECONDS,
    SHORTEST,
    WAKE_SECONDS,
    StepClock,
)
from asyncllm.step_plan import PrefillRow, StepPlan
from asyncllm.types import DeviceTimes, StepResult
from tests.engine.builders import make_sequence

PROMPT = PrefillRow(make_sequence(1, [5, 6, 7]), 1, 0, [5, 6, 7], [[1]], ())


@dataclass
class TimedStep:
    times: DeviceTimes

    async def wait(self) -> StepResult:
        raise NotImplementedError

    def device_times(self) -> DeviceTimes:
        return self.times


class Clock(StepClock):
    """One that is told of each step in one call."""

    def step(self, kind: str, start: float, duration: float, *, host_seconds: float = 0.0) -> None:
        decodes, prefills = [1] * (kind != "prefill"), [PROMPT] * (kind != "decode")
        self.launched(TimedStep(DeviceTimes(start, start + duration)), host_seconds)
        plan: Any = StepPlan(1, decodes, prefills)  # type: ignore[arg-type]
        assert self.finished(plan).kind == kind


def test_at_once_while_nothing_is_known() -> None:
    clock = Clock()
    assert clock.seconds_to_plan(100.0) == 0
    clock.step("prefill", 100.0, 0.5)  # a first step: how long decodes take is open
    assert clock.seconds_to_plan(100.5) == 0


def test_a_lead_before_the_step_in_flight_can_be_over() -> None:
    clock = Clock()
    clock.step("decode", 100.0, 0.010, host_seconds=0.001)
    due = 100.010 + SHORTEST * 0.010 - WAKE_SECONDS - 0.001
    assert clock.seconds_to_plan(100.011) == pytest.approx(due - 100.011)
    assert clock.seconds_to_plan(due + 0.001) == 0, "late already"


def test_a_step_with_prefills_is_taken_to_last_as_long_as_decodes_alone() -> None:
    clock = Clock()
    clock.step("decode", 100.0, 0.010)
    clock.step("mixed", 100.010, 0.030)
    due = 100.040 + SHORTEST * 0.010 - WAKE_SECONDS
    assert clock.seconds_to_plan(100.040) == pytest.approx(due - 100.040)


def test_a_slow_step_does_not_delay_the_next() -> None:
    clock = Clock()
    clock.step("decode", 100.0, 0.010)
    clock.step("decode", 100.010, 5.0)  # a kernel was compiled
    due = 105.010 + SHORTEST * 0.010 - WAKE_SECONDS
    assert clock.seconds_to_plan(105.010) == pytest.approx(due - 105.010)
    first = Clock()
    first.step("decode", 100.0, 5.0)  # nothing else is known
    assert first.seconds_to_plan(105.0) == MOST_SECONDS


def test_short_steps_are_planned_at_once() -> None:
    clock = Clock()
    clock.step("decode", 100.0, WAKE_SECONDS)
    assert clock.seconds_to_plan(100.0 + WAKE_SECONDS) == 0


def test_a_slow_plan_is_remembered_for_a_while() -> None:
    clock = Clock()
    clock.step("decode", 99.990, 0.010, host_seconds=0.004)
    clock.step("decode", 100.0, 0.010, host_seconds=0.001)
    due = 100.010 + SHORTEST * 0.010 - WAKE_SECONDS - 0.004 * FORGET
    assert clock.seconds_to_plan(100.010) == pytest.approx(due - 100.010)


def test_idleness_forgets_the_step_in_flight() -> None:
    clock = Clock()
    clock.step("decode", 100.0, 0.010)
    clock.idle()
    assert clock.seconds_to_plan(100.010) == 0
