"""Where a step's device work runs and how its end is awaited; nothing of what the work is.

`submit(work)` gives the device one step. `work()` does it and returns `collect`, which reads the
results once the device is done. Steps run in the order of their submission, always: that order
is what makes slots and pages reusable at once (see scheduler.py).

  ThreadExecutor  the CPU: one thread is the stream; torch releases the GIL inside its kernels
  StreamExecutor  CUDA: `work` only enqueues on one stream, from the event loop's own thread
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from asyncllm.types import StepResult
from asyncllm.worker.event_waiter import EventWaiter
from asyncllm.worker.step_timer import DeviceTimes, StepTimer, StreamClock

Collect = Callable[[], StepResult]
Work = Callable[[], Collect]


class LaunchedStep(Protocol):
    async def wait(self) -> StepResult: ...

    def device_times(self) -> DeviceTimes:
        """When the device worked on it; after `wait`."""
        ...


class Executor(Protocol):
    def submit(self, work: Work) -> LaunchedStep: ...

    def drain(self) -> None:
        """Block until everything submitted is done; raises what a lost device raises."""
        ...

    def close(self) -> None:
        """Drain and end the threads; nothing may be submitted afterwards."""
        ...


class _ThreadStep:
    def __init__(self, future: Future[StepResult], times: DeviceTimes) -> None:
        self._future, self._times = future, times

    async def wait(self) -> StepResult:
        return await asyncio.wrap_future(self._future)

    def device_times(self) -> DeviceTimes:
        return self._times


class ThreadExecutor:
    """The CPU as a device with one stream."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-cpu")

    def submit(self, work: Work) -> LaunchedStep:
        times = DeviceTimes()
        return _ThreadStep(self._thread.submit(_run, work, times), times)

    def drain(self) -> None:
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)


@torch.inference_mode()
def _run(work: Work, times: DeviceTimes) -> StepResult:
    times.started = time.monotonic()
    result = work()()
    times.ended = time.monotonic()
    return result


class EventStep:
    """A step that `done` ends. Made right after its work was enqueued."""

    def __init__(
        self, done: torch.cuda.Event, collect: Collect, waiter: EventWaiter, timer: StepTimer
    ) -> None:
        self._done, self._collect, self._waiter = done, collect, waiter
        self._timer = timer
        self._submitted_s = time.perf_counter()

    async def wait(self) -> StepResult:
        await self._waiter.wait(self._done, self._submitted_s)
        self._timer.see()
        return self._collect()

    def device_times(self) -> DeviceTimes:
        return self._timer.times(self._done)


# Streams of closed engines, for the next one: torch keeps cuBLAS workspaces (64 MiB on Hopper) for
# every stream that ever ran a product, so a new stream per engine would leak them.
_idle_streams: list[torch.cuda.Stream] = []


class StreamExecutor:
    """One CUDA stream, and its waiter."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _idle_streams.pop() if _idle_streams else torch.cuda.Stream(device)
        self._waiter = EventWaiter()
        self._clock = StreamClock()

    @torch.inference_mode()
    def submit(self, work: Work) -> LaunchedStep:
        with torch.cuda.stream(self.stream):
            timer = StepTimer(self._clock)
            collect = work()
            # Who waits for it sleeps in the driver.
            done = torch.cuda.Event(enable_timing=True, blocking=True)
            done.record(self.stream)
        return EventStep(done, collect, self._waiter, timer)

    def drain(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self._waiter.close()
        self.stream.synchronize()
        _idle_streams.append(self.stream)
