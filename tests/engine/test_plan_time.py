"""When the next step is planned: a lead before the step in flight can be over, never later."""

from __future__ import annotations

import pytest

from asyncllm.engine.plan_time import FORGET, MOST_SECONDS, SHORTEST, WAKE_SECONDS, PlanTime
from asyncllm.engine.stats import StepKind, StepRecord


def step(kind: StepKind, start: float, duration: float) -> StepRecord:
    return StepRecord(
        step_id=1,
        kind=kind,
        rows=1,
        tokens=1,
        prefill_tokens=0,
        start=start,
        duration=duration,
        launch_lead=None,
        starved=0.0,
        num_swap_out=0,
        num_swap_in=0,
    )


def test_at_once_while_nothing_is_known() -> None:
    plan_time = PlanTime()
    assert plan_time.seconds_to_wait(100.0) == 0
    plan_time.finished(step("prefill", 100.0, 0.5))  # a first step: how long decodes take is open
    assert plan_time.seconds_to_wait(100.5) == 0


def test_a_lead_before_the_step_in_flight_can_be_over() -> None:
    plan_time = PlanTime()
    plan_time.planned(0.001)
    plan_time.finished(step("decode", 100.0, 0.010))
    due = 100.010 + SHORTEST * 0.010 - WAKE_SECONDS - 0.001
    assert plan_time.seconds_to_wait(100.011) == pytest.approx(due - 100.011)
    assert plan_time.seconds_to_wait(due + 0.001) == 0, "late already"


def test_a_step_with_prefills_is_taken_to_last_as_long_as_decodes_alone() -> None:
    plan_time = PlanTime()
    plan_time.finished(step("decode", 100.0, 0.010))
    plan_time.finished(step("mixed", 100.010, 0.030))
    due = 100.040 + SHORTEST * 0.010 - WAKE_SECONDS
    assert plan_time.seconds_to_wait(100.040) == pytest.approx(due - 100.040)


def test_a_slow_step_does_not_delay_the_next() -> None:
    plan_time = PlanTime()
    plan_time.finished(step("decode", 100.0, 0.010))
    plan_time.finished(step("decode", 100.010, 5.0))  # a kernel was compiled
    due = 105.010 + SHORTEST * 0.010 - WAKE_SECONDS
    assert plan_time.seconds_to_wait(105.010) == pytest.approx(due - 105.010)
    first = PlanTime()
    first.finished(step("decode", 100.0, 5.0))  # nothing else is known
    assert first.seconds_to_wait(105.0) == MOST_SECONDS


def test_short_steps_are_planned_at_once() -> None:
    plan_time = PlanTime()
    plan_time.finished(step("decode", 100.0, WAKE_SECONDS))
    assert plan_time.seconds_to_wait(100.0 + WAKE_SECONDS) == 0


def test_a_slow_plan_is_remembered_for_a_while() -> None:
    plan_time = PlanTime()
    plan_time.planned(0.004)
    plan_time.planned(0.001)
    plan_time.finished(step("decode", 100.0, 0.010))
    due = 100.010 + SHORTEST * 0.010 - WAKE_SECONDS - 0.004 * FORGET
    assert plan_time.seconds_to_wait(100.010) == pytest.approx(due - 100.010)


def test_idleness_forgets_the_step_in_flight() -> None:
    plan_time = PlanTime()
    plan_time.finished(step("decode", 100.0, 0.010))
    plan_time.idle()
    assert plan_time.seconds_to_wait(100.010) == 0
