"""Where a step's device work runs and how its end is awaited; nothing of what the work is.

`submit(work)` gives the device one step. `work()` does it and returns `collect`, which reads the
results once the device is done. Steps run in the order of their submission, always: that order
is what makes slots and pages reusable at once (see scheduler.py). `begin(first)` gives it the first
part of a step; the function that it returns gives it the rest, later and from any thread, before
anything else.
Steps of one `shape` last about as long, which says how long the next of them is waited for.

  ThreadExecutor  the CPU: one thread is the stream; torch releases the GIL inside its kernels
  InlineExecutor  the CPU of a rank that only repeats steps
  StreamExecutor  CUDA: `work` only enqueues on one stream, from the event loop's own thread
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from asyncllm.step_plan import StepShape
from asyncllm.types import DeviceTimes, LaunchedStep, StepResult
from asyncllm.worker.event_waiter import EventWaiter

Collect = Callable[[], StepResult]
Work = Callable[[], Collect]
T = TypeVar("T")
CLOCK_DRIFT = 1e-4  # the device's clock may be this much slower than the host's


# Gives a begun step the rest of its work, which gets what the first part returned: once.
EndStep = Callable[[Callable[[T], Collect]], LaunchedStep]


class HostStep:
    """A step whose forward pass is launched: what is sampled from waits on the device for what the
    host has to say. `sample`, once, launches the rest; then `wait`."""

    def __init__(self, end: Callable[[np.ndarray], LaunchedStep]) -> None:
        self._end = end
        self._whole: LaunchedStep | None = None

    def sample(self, masked_rows: np.ndarray) -> None:
        """From any thread, all steps before being finished, and before any other launch.
        masked_rows: int32, the rows that the first masks in the buffer are for."""
        assert self._whole is None, "a step is sampled twice"
        self._whole = self._end(masked_rows)

    async def wait(self) -> StepResult:
        assert self._whole is not None, "a step is awaited that nobody samples"
        return await self._whole.wait()

    def device_times(self) -> DeviceTimes:
        assert self._whole is not None
        return self._whole.device_times()


@dataclass(slots=True, eq=False)
class _ThreadStep:
    future: Future[StepResult]
    times: DeviceTimes

    async def wait(self) -> StepResult:
        return await asyncio.wrap_future(self.future)

    def device_times(self) -> DeviceTimes:
        return self.times


class ThreadExecutor:
    """The CPU as a device with one stream."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-cpu")

    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep:
        times = DeviceTimes()
        return _ThreadStep(self._thread.submit(_timed, lambda: work()(), times), times)

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> EndStep[T]:
        times = DeviceTimes()
        begun = self._thread.submit(_timed, first, times)

        def end(rest: Callable[[T], Collect]) -> LaunchedStep:
            # `begun` is done by then, this thread's job before, and raises what `first` raised.
            done = self._thread.submit(_timed, lambda: rest(begun.result())(), times)
            return _ThreadStep(done, times)

        return end

    def between_steps(self) -> AbstractContextManager[None]:
        """Work of the calling thread, after all steps so far; done when it is left."""
        self.drain()
        return nullcontext()

    def drain(self) -> None:
        """Block until everything submitted is done; raises what a lost device raises."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Drain and end the threads; nothing may be submitted afterwards."""
        self._thread.shutdown(wait=True)


class InlineExecutor:
    """The CPU of a rank for whose steps nobody waits: the calling thread is the stream."""

    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep:
        return self.begin(work, shape)(lambda collect: collect)

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> EndStep[T]:
        times = DeviceTimes()
        value = _timed(first, times)

        def end(rest: Callable[[T], Collect]) -> LaunchedStep:
            done: Future[StepResult] = Future()
            done.set_result(_timed(lambda: rest(value)(), times))
            return _ThreadStep(done, times)

        return end

    def between_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drain(self) -> None:
        """All is done."""

    def close(self) -> None:
        """It has no thread."""


@torch.inference_mode()
def _timed(work: Callable[[], T], times: DeviceTimes) -> T:
    """A whole step, or a part of one."""
    times.started = times.started or time.monotonic()
    result = work()
    times.ended = time.monotonic()
    return result


class StreamClock:
    """Places the ends of one stream's steps in the host's time, in the order of the steps.

    Events know durations, not times of day: an end is placed by the end before it, and never after
    the moment at which the host saw it. So durations and gaps are the device's own (events resolve
    0.5 us), and a place in time is late by no more than the promptest sight of a recent step (a
    thread's wake-up, about 0.1 ms).
    """

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, float] | None = None

    def place(self, end: torch.cuda.Event, seen: float) -> float:
        """When `end` happened, which the host saw at `seen`."""
        ended = seen
        if self._last is not None:
            before, ended_before = self._last
            seconds = before.elapsed_time(end) / 1e3
            ended = min(seen, ended_before + seconds * (1 + CLOCK_DRIFT))
        self._last = (end, ended)
        return ended


class EventStep:
    """A step between two events on a stream. All between them counts as busy, gaps between kernels
    included. The events are read once the host has seen the second, which synchronises nothing."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        waiter: EventWaiter,
        clock: StreamClock,
        shape: StepShape | None,
    ) -> None:
        """Right before the first of its work is enqueued."""
        self._stream, self._waiter, self._clock, self._shape = stream, waiter, clock, shape
        self._submitted_s = time.perf_counter()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record(stream)  # said, not looked up: that takes longer
        self._seen: float | None = None

    def end(self, collect: Collect) -> EventStep:
        """Right after the last of its work was enqueued."""
        self._collect = collect
        # Who waits sleeps in the driver.
        self._done = torch.cuda.Event(enable_timing=True, blocking=True)
        self._done.record(self._stream)
        return self

    async def wait(self) -> StepResult:
        await self._waiter.wait(self._done, self._submitted_s, self._shape)
        self._seen = time.monotonic()
        return self._collect()

    def device_times(self) -> DeviceTimes:
        assert self._seen is not None, "device times of a step that has not ended"
        ended = self._clock.place(self._done, self._seen)
        return DeviceTimes(ended - self._start.elapsed_time(self._done) / 1e3, ended)


# Streams of closed engines, for the next one: torch keeps cuBLAS workspaces (64 MiB on Hopper) for
# every stream that ever ran a product, so a new stream per engine would leak them.
_idle_streams: list[torch.cuda.Stream] = []


class StreamExecutor:
    """One CUDA stream, and its waiter. Steps enter the stream itself, a third of the time that
    `torch.cuda.stream` takes. What is to be restored torch keeps in the stream: it is entered by
    one thread at a time, and once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _idle_streams.pop() if _idle_streams else torch.cuda.Stream(device)
        self._waiter = EventWaiter()
        self._clock = StreamClock()

    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep:
        with torch.inference_mode(), self.stream:
            return EventStep(self.stream, self._waiter, self._clock, shape).end(work())

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> EndStep[T]:
        with torch.inference_mode(), self.stream:
            step, value = EventStep(self.stream, self._waiter, self._clock, shape), first()

        def end(rest: Callable[[T], Collect]) -> LaunchedStep:
            with torch.inference_mode(), self.stream:
                return step.end(rest(value))

        return end

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        torch.cuda.synchronize(self.stream.device)
        with torch.cuda.stream(self.stream):
            yield
        self.drain()

    def drain(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self._waiter.close()
        self.stream.synchronize()
        _idle_streams.append(self.stream)


Executor = ThreadExecutor | InlineExecutor | StreamExecutor
