"""Device times by CUDA events against work of known length."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
import torch

from asyncllm.types import DeviceTimes, StepResult
from asyncllm.worker.executor import Collect, StreamExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CYCLES = 20_000_000  # some 10 ms


def work() -> Collect:
    torch.cuda._sleep(CYCLES)
    return lambda: StepResult([])


def test_steps_are_timed_back_to_back() -> None:
    async def main() -> list[DeviceTimes]:
        executor = StreamExecutor(torch.device("cuda"))
        try:
            for _ in range(2):  # the clock frequency rises; and a prompt sight to begin with
                first = executor.submit(work)
                await first.wait()
                first.device_times()
            steps = [executor.submit(work) for _ in range(3)]
            await asyncio.sleep(0.2)  # the host looks late: long after all three have ended
            found = []
            for step in [*steps, executor.submit(work)]:
                await step.wait()
                found.append(step.device_times())
            return found
        finally:
            executor.close()

    times = asyncio.run(main())
    durations = [t.ended - t.started for t in times]
    assert max(durations[:3]) < 1.2 * min(durations[:3])
    for before, after in pairwise(times[:3]):
        assert abs(after.started - before.ended) < 0.1 * durations[0]  # no gap
    assert times[3].started - times[2].ended > 0  # the device was idle
    assert all(t.ended <= time.monotonic() for t in times)
