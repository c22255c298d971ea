"""The recorder's totals of steps and requests, and its last minute."""

from __future__ import annotations

import asyncio
import sys
import time
from types import FrameType
from typing import Any

import pytest
import uvloop

from asyncllm.engine.recorder import TIMELINE_STEPS, Recorder
from asyncllm.engine.snapshot import Snapshot, take_snapshot
from asyncllm.engine.stats import (
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
    StepRecord,
)
from asyncllm.engine.step_clock import LoopLag
from asyncllm.mesh_config import RankStats
from asyncllm.worker.work_counts import WorkCounts


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock: a list of one number. Half of the time is CPU time."""
    moment = [1000.0]
    for module in ("recorder", "snapshot"):
        monkeypatch.setattr(f"asyncllm.engine.{module}.time.monotonic", lambda: moment[0])
    monkeypatch.setattr("asyncllm.engine.recorder.time.thread_time", lambda: moment[0] / 2)
    return moment


def step(number: int = 1, start: float = 0.0, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step_id": number, "kind": "decode", "rows": 4, "tokens": 4, "prefill_tokens": 0,
        "start": start, "duration": 0.25, "launch_lead": 0.01, "starved": 0.0,
    }  # fmt: skip
    return StepRecord(**fields | changes)


def finished(**changes: Any) -> FinishedRequestStats:
    fields: dict[str, Any] = {
        "request_id": "r", "finish_reason": "stop", "num_prompt_tokens": 40,
        "num_generation_tokens": 6, "max_num_generation_tokens": 4, "num_cached_tokens": 32,
        "max_tokens": 9, "n": 2, "e2e_time": 2.0, "queue_time": 0.5, "prefill_time": 0.25,
        "decode_time": 1.0, "time_to_first_token": 0.75, "time_per_output_token": 0.3,
    }  # fmt: skip
    return FinishedRequestStats(**fields | changes)


class FakeReplica:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.work = WorkCounts()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_pages=10)

    def picture(self, pages_per_cell: int) -> str:
        return "." * (10 // pages_per_cell)

    def observe(self) -> None:
        pass

    def health(self) -> str | None:
        return None

    def ranks(self) -> list[RankStats]:
        return [RankStats(0)]


def snapshot(*recorders: Recorder) -> Snapshot:
    return take_snapshot([*map(FakeReplica, recorders)], 256)


def test_totals() -> None:
    recorder, stats = Recorder(), SchedulerStats()
    iteration = IterationStats(
        num_prompt_tokens=40, num_cached_tokens=32, num_generation_tokens=4,
        time_to_first_tokens=[0.75], inter_token_latencies=[0.02] * 3, finished=[finished()],
        step=step(kind="mixed", tokens=11, prefill_tokens=8, num_swap_out=3, num_swap_in=2),
    )  # fmt: skip
    recorder.record(stats, iteration)
    recorder.record(stats, IterationStats(finished=[finished(finish_reason="abort",
        queue_time=None, prefill_time=None, decode_time=None, time_to_first_token=None,
        time_per_output_token=None)]))  # fmt: skip
    assert (recorder.prompt_tokens, recorder.cached_tokens) == (40, 32)
    assert (recorder.generation_tokens, recorder.prefill_tokens) == (4, 8)
    assert (recorder.swapped_out_pages, recorder.swapped_in_pages) == (3, 2)
    assert recorder.finished == {"stop": 1, "abort": 1}
    assert recorder.device_seconds == 0.25
    assert recorder.iteration_tokens.total == 8 + 4  # computed of prompts, and generated
    assert recorder.step_time["mixed"].counts.sum() == 1
    assert recorder.step_time["decode"].counts.sum() == 0
    assert recorder.inter_token_latency.total == pytest.approx(0.06)
    counts = {
        "e2e": 2, "queue_time": 1, "prefill_time": 1, "decode_time": 1, "inference_time": 1,
        "time_per_output_token": 1, "n": 2, "computed_lengths": 2, "longest_generations": 2,
    }  # fmt: skip
    for name, count in counts.items():
        assert getattr(recorder, name).counts.sum() == count, name
    assert recorder.inference_time.total == 1.25
    assert recorder.computed_lengths.total == 16
    assert recorder.longest_generations.total == 8


def test_a_late_launch_has_no_lead() -> None:
    recorder = Recorder()
    for lead in (-0.5, None, 0.5):
        recorder.record(SchedulerStats(), IterationStats(step=step(launch_lead=lead, starved=0.5)))
    assert recorder.launch_lead.cumulative()[0] == 1  # in the bucket le="0"
    assert recorder.launch_lead.total == 0.5  # a sum that never falls
    assert recorder.starved_seconds == 1.5


def test_rates_and_latencies_forget(now: list[float]) -> None:
    recorder, stats = Recorder(), SchedulerStats()
    for number in range(40):  # 10 s, a step every quarter of a second, 4 tokens each
        latency = 0.1 if number < 20 else 0.2
        recorder.record(
            stats,
            IterationStats(
                num_generation_tokens=4, inter_token_latencies=[latency] * 4, step=step(number)
            ),
        )
        now[0] += 0.25
    seen = snapshot(recorder)
    assert seen.rates.generation_tokens_per_s == pytest.approx(16)
    assert seen.rates.device_busy_share == pytest.approx(1)
    assert seen.rates.host_us_per_token == pytest.approx(0.5e6 / 16)
    itl = seen.latencies.inter_token
    assert itl.count == 160
    assert itl.p50_ms == pytest.approx(100, rel=0.06)
    assert itl.p90_ms == pytest.approx(200, rel=0.06)
    now[0] += 4
    assert snapshot(recorder).rates.generation_tokens_per_s == pytest.approx(4, rel=0.3)
    now[0] += 2
    assert snapshot(recorder).rates.generation_tokens_per_s == 0
    now[0] += 46  # 62 s after the beginning, 52 after the end
    itl = snapshot(recorder).latencies.inter_token
    assert 100 <= itl.count < 160
    now[0] += 60
    seen = snapshot(recorder)
    assert seen.latencies.inter_token.count == 0 and seen.latencies.inter_token.p50_ms is None
    assert seen.totals.generation_tokens == 160


def test_memory_is_bounded(now: list[float]) -> None:
    recorder = Recorder()
    for number in range(10 * TIMELINE_STEPS):
        recorder.record(SchedulerStats(), IterationStats(step=step(number)))
        now[0] += 0.1
    assert len(recorder.timeline) == TIMELINE_STEPS
    assert len(recorder._marks) <= 62


def test_work_per_step_is_independent_of_its_rows(now: list[float]) -> None:
    """Python calls of one record, counted: nothing is done per token."""
    recorder = Recorder()

    def num_calls(rows: int) -> int:
        iteration = IterationStats(
            num_generation_tokens=rows, inter_token_latencies=[0.01] * rows, step=step()
        )
        calls = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            recorder.record(SchedulerStats(), iteration)
        finally:
            sys.setprofile(None)
        return calls

    num_calls(32)  # the first marks the second
    assert num_calls(32) == num_calls(512) < 60


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_loop_lag(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lags: list[float] = []

    async def main() -> None:
        monkeypatch.setattr("asyncllm.engine.step_clock.LAG_INTERVAL_S", 0.01)
        lag = LoopLag(lags.append)
        lag.watch()
        lag.watch()  # one timer at a time
        await asyncio.sleep(0)
        time.sleep(0.06)  # noqa: ASYNC251 (a callback that holds the loop)
        while not lags:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)
        assert len(lags) == 1  # nobody watches: no timer
        lag.watch()
        lag.close()
        await asyncio.sleep(0.03)

    run(main())
    assert len(lags) == 1 and lags[0] > 0.03
