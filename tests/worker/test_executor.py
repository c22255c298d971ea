"""The CPU's executor: whole steps and steps in two parts, in the order of their submission."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncllm.types import StepResult
from asyncllm.worker.executor import Collect, ThreadExecutor


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
