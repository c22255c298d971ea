"""Whole steps and steps in two parts, in the order of their submission; a stream's threads."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from asyncllm.types import StepResult
from asyncllm.worker import executor as executors
from asyncllm.worker.executor import Collect, StreamExecutor, ThreadExecutor


def test_a_step_in_two_parts_runs_in_order_and_counts_as_one() -> None:
    async def main() -> None:
        executor = ThreadExecutor()
        order: list[str] = []
        may_begin = threading.Event()

        def first() -> int:
            may_begin.wait(10)
            order.append("first")
            return 7

        def rest(value: int) -> Collect:
            order.append("rest")
            return lambda: StepResult([value])

        end = executor.begin(first)
        assert order == [], "it runs on the device, not here"
        may_begin.set()
        step = await asyncio.to_thread(end, rest)
        after = executor.submit(lambda: lambda: StepResult([len(order)]))
        assert (await step.wait()).token_ids == [7]
        assert (await after.wait()).token_ids == [2]
        assert order == ["first", "rest"]
        assert 0 < step.device_times().started <= step.device_times().ended
        assert step.device_times().ended <= after.device_times().started
        executor.close()

    asyncio.run(main())


def test_what_the_first_part_raises_comes_out_of_the_step() -> None:
    async def main() -> None:
        executor = ThreadExecutor()

        def boom() -> int:
            raise RuntimeError("boom")

        def never(value: int) -> Collect:
            raise AssertionError("the rest of a step that failed")

        step = executor.begin(boom)(never)
        with pytest.raises(RuntimeError, match="boom"):
            await step.wait()
        assert (await executor.submit(lambda: lambda: StepResult([1])).wait()).token_ids == [1]
        executor.close()

    asyncio.run(main())


class Stream:
    """As torch's: it keeps what its `__exit__` restores, for one thread."""

    is_entered = False

    def __enter__(self) -> None:
        assert not self.is_entered, "Stream's context should not be initialized."
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        self.is_entered = False

    def synchronize(self) -> None:
        """Nothing runs on it."""


class Event:
    def __init__(self, **_: bool) -> None:
        """Without times."""

    def record(self, stream: Stream) -> None:
        """Nothing waits for it."""


def test_a_copy_while_another_thread_ends_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an adapter, while masks are filled in a thread that then launches the sampling."""
    monkeypatch.setattr(executors, "_idle_streams", [Stream()])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    executor = StreamExecutor(torch.device("cuda"))
    is_sampling, may_end, order = threading.Event(), threading.Event(), list[str]()

    def sample(value: int) -> Collect:
        is_sampling.set()
        may_end.wait(10)
        order.append("sampled")
        return lambda: StepResult([value])

    def copy() -> Collect:
        order.append("copied")
        return lambda: StepResult([])

    end = executor.begin(lambda: 7)
    ending = threading.Thread(target=end, args=(sample,))
    ending.start()
    assert is_sampling.wait(10)
    threading.Timer(0.05, may_end.set).start()
    executor.submit(copy)
    ending.join(10)
    assert order == ["sampled", "copied"]
    executor.close()
