"""Device and host times of steps, joined: with times that the test sets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncllm.engine.step_clock import StepClock
from asyncllm.step_plan import StepPlan
from asyncllm.types import DeviceTimes, StepResult
from asyncllm.worker import executor
from asyncllm.worker.executor import EventStep, StreamClock
from asyncllm.worker.work_counts import WorkCounts
from tests.engine.builders import make_request, make_scheduler, run_step


@dataclass
class TimedStep:
    times: DeviceTimes = field(default_factory=DeviceTimes)

    async def wait(self) -> StepResult:
        raise NotImplementedError

    def device_times(self) -> DeviceTimes:
        return self.times


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock: a list of one number."""
    moment = [100.0]
    monkeypatch.setattr("asyncllm.engine.step_clock.time.monotonic", lambda: moment[0])
    return moment


def empty_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), ())


def test_lead_and_busy_time(now: list[float]) -> None:
    clock = StepClock()
    steps = [TimedStep(DeviceTimes(100.0, 100.4)), TimedStep(DeviceTimes(100.4, 100.9)),
             TimedStep(DeviceTimes(101.2, 101.5))]  # fmt: skip
    clock.launched(steps[0], 0.0)
    now[0] = 100.1  # ahead of the end of the first
    clock.launched(steps[1], 0.0)
    first = clock.finished(empty_plan(1))
    assert (first.start, first.launch_lead, first.starved) == (100.0, None, 0.0)
    assert first.duration == pytest.approx(0.4)
    second = clock.finished(empty_plan(2))
    assert second.launch_lead == pytest.approx(0.3)
    assert second.starved == 0.0
    now[0] = 101.2  # too late: the device had run dry at 100.9
    clock.launched(steps[2], 0.0)
    third = clock.finished(empty_plan(3))
    assert third.launch_lead == pytest.approx(-0.3)
    assert third.starved == pytest.approx(0.3)


@pytest.mark.parametrize("end", ["idle", "reset"])
def test_idleness_is_not_starving(now: list[float], end: str) -> None:
    clock = StepClock()
    clock.launched(TimedStep(DeviceTimes(100.0, 100.4)), 0.0)
    clock.finished(empty_plan(1))
    getattr(clock, end)()
    now[0] = 200.0
    clock.launched(TimedStep(DeviceTimes(200.0, 200.1)), 0.0)
    record = clock.finished(empty_plan(2))
    assert (record.launch_lead, record.starved) == (None, 0.0)


def test_reset_forgets_what_was_in_flight() -> None:
    clock = StepClock()
    clock.launched(TimedStep(DeviceTimes(1.0, 2.0)), 0.0)
    clock.reset()
    clock.launched(TimedStep(DeviceTimes(5.0, 6.0)), 0.0)
    assert clock.finished(empty_plan(1)).start == 5.0


def test_kinds() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request(1, range(4)))
    prefill = run_step(scheduler)
    scheduler.add(make_request(2, range(20)))
    mixed = run_step(scheduler)
    clock, kinds = StepClock(), []
    for plan in (prefill, empty_plan(3), mixed):
        clock.launched(TimedStep(), 0.0)
        record = clock.finished(plan)
        kinds.append(record.kind)
    assert kinds == ["prefill", "swap", "mixed"]
    assert (record.rows, record.tokens, record.prefill_tokens) == (2, 8, 7)


class Event:
    """A CUDA event on a device whose clock started at another time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


def test_a_late_sight_does_not_move_the_end() -> None:
    clock = StreamClock()
    place = lambda at, seen: clock.place(Event(at), seen)  # type: ignore[arg-type]  # noqa: E731
    assert place(5.0, 1000.0) == 1000.0
    # The second ends 10 ms after the first; the host was busy and saw it 7 ms late.
    assert place(5.010, 1000.017) == pytest.approx(1000.010, abs=1e-5)
    # A prompt sight corrects what the first sight was late by.
    assert place(5.020, 1000.019) == 1000.019
    # After an hour the clocks have drifted apart: what the host saw is the better bound.
    assert place(3605.020, 4600.020) == 4600.020


def test_a_step_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = [7.0], [100.0]
    ours: Any = object()

    class Recorded(Event):
        def __init__(self, enable_timing: bool, blocking: bool = False) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream is ours
            self.at = device[0]

    class Waiter:
        async def wait(self, event: Recorded, submitted_s: float, shape: object) -> None:
            device[0], host[0] = 7.5, 100.5

    monkeypatch.setattr(executor.torch.cuda, "Event", Recorded)
    monkeypatch.setattr(executor.time, "monotonic", lambda: host[0])
    waiter: Any = Waiter()
    step = EventStep(ours, waiter, StreamClock(), None)
    device[0] = 7.25
    assert asyncio.run(step.end(lambda: StepResult([3])).wait()).token_ids == [3]
    times = step.device_times()
    assert (times.started, times.ended) == (100.25, 100.5)  # the first end is where it was seen


def test_work_counts() -> None:
    counts = WorkCounts()
    counts.ran("decode", 5, 8)
    counts.ran("decode", 8, 8)
    counts.ran("decode", 600)
    counts.ran("mixed", 100)
    assert counts.steps == {
        ("decode", "graph"): 2, ("decode", "eager"): 1,
        ("mixed", "graph"): 0, ("mixed", "eager"): 1,
    }  # fmt: skip
    assert (counts.num_tokens, counts.num_padding) == (713, 3)
