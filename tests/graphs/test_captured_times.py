"""Ways timed in graphs, with a clock and graphs of the test."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from asyncllm.graphs.captured_times import ROUNDS, captured_seconds, least
from tests.device_clock import DeviceClock
from tests.worker.recorded_graph import RecordedGraph


def test_each_is_captured_once_and_replayed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = DeviceClock(monkeypatch), []
    times = iter([2.0, 1.0])

    class Timed:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            order.append("begin")

        def capture_end(self) -> None:
            order.append("end")
            self.ms = next(times)
            self.is_there = False

        def pool(self) -> str:
            return "the pool"

        def reset(self) -> None:
            self.is_there = False

        def replay(self) -> None:
            order.append(f"replay {self.ms}")
            clock.ms += self.ms if self.is_there else 40.0
            self.is_there = True

    implementations = [lambda name=name: order.append(name) for name in ("a", "b")]
    assert captured_seconds(implementations, Timed) == pytest.approx([2e-3, 1e-3])
    captured = [step for name in ("a", "b") for step in (name, "begin", name, "end")]
    assert order == [*captured, *["replay 2.0", "replay 1.0"] * (1 + ROUNDS)]


def test_memory_is_given_back_once_the_graphs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DeviceClock(monkeypatch)
    made: list[weakref.ref[Ticking]] = []
    there: list[bool] = []
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: there.extend(graph() is not None for graph in made)
    )

    class Ticking(RecordedGraph):
        def __init__(self) -> None:
            made.append(weakref.ref(self))

        def replay(self) -> None:
            clock.ms += 1.0

    captured_seconds([lambda: None] * 2, Ticking)
    assert there == [False, False]


def test_what_is_measured_beside_anothers_work_is_no_measurement() -> None:
    assert least([1.2, 1.0, 1.1]) == 1.0
    with pytest.raises(RuntimeError, match="other work: it took 10, 30 us"):
        least([1e-5, 3e-5])
