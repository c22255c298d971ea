"""Where a step's device work runs, and how its end is awaited. It does not know what the work is.

`submit(work)` runs one step: `work()` does it or enqueues it, and returns `collect`, which reads
the results once the device is done. `begin(first)` runs the first part of a step and returns a
function that runs the rest, later and from any thread, before another step is submitted; copies of
adapters may come in between. Steps run in the order of their submission. This is what makes slots
and pages reusable at once (see scheduler.py). Steps of the same `shape` take about as long, which
tells how long to wait for one.

  ThreadExecutor  CPU: one thread is the stream; torch releases the GIL inside its kernels
  StreamExecutor  CUDA: `work` only enqueues on one stream, from the event loop's thread
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch

from asyncllm.step_plan import StepShape
from asyncllm.types import DeviceTimes, LaunchedStep, StepResult
from asyncllm.worker.event_waiter import EventWaiter

Collect = Callable[[], StepResult]
Work = Callable[[], Collect]
T = TypeVar("T")
CLOCK_DRIFT = 1e-4  # the device's clock may be this much slower than the host's


# Runs the rest of a begun step, which gets the value that its first part returned. Called once.
EndStep = Callable[[Callable[[T], Collect]], LaunchedStep]


class HostStep:
    """A step whose forward pass is launched and whose sampling waits for the host: call `sample`
    once, then `wait`."""

    def __init__(self, end: Callable[[np.ndarray], LaunchedStep]) -> None:
        self._end: Callable[[np.ndarray], LaunchedStep] | None = end
        self._whole: LaunchedStep | None = None

    def sample(self, masked_rows: np.ndarray) -> None:
        """Launch the sampling, from any thread: when all steps before are finished, and before any
        other launch. masked_rows: int32, the rows that the first masks in the buffer are for."""
        assert self._end is not None, "a step is sampled twice"
        self._whole = self._end(masked_rows)
        self._end = None  # it keeps the runner, and the step is kept for its times

    async def wait(self) -> StepResult:
        assert self._whole is not None, "a step is awaited before it is sampled"
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


class _CallingThread:
    """Runs each job at once, in the thread that submits it."""

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(job(*args))
        return done

    def shutdown(self, wait: bool) -> None:
        """There is no thread to end."""


class ThreadExecutor:
    """The CPU as a device with one stream: a thread, or `inline` the calling thread, for a rank
    that only follows rank 0 and never awaits a step."""

    def __init__(self, *, inline: bool = False) -> None:
        pool = partial(ThreadPoolExecutor, 1, thread_name_prefix="asyncllm-cpu")
        self._thread = _CallingThread() if inline else pool()

    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep:
        times = DeviceTimes()
        return _ThreadStep(self._thread.submit(_timed, lambda: work()(), times), times)

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> EndStep[T]:
        times = DeviceTimes()
        begun = self._thread.submit(_timed, first, times)

        def end(rest: Callable[[T], Collect]) -> LaunchedStep:
            # `begun` was the thread's last job, so it is done; it raises what `first` raised.
            done = self._thread.submit(_timed, lambda: rest(begun.result())(), times)
            return _ThreadStep(done, times)

        return end

    def between_steps(self) -> AbstractContextManager[None]:
        """A context for work of the calling thread, after all steps submitted so far."""
        self.drain()
        return nullcontext()

    def drain(self) -> None:
        """Block until all submitted work is done. Raises what a lost device raises."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Drain, and end the thread; nothing may be submitted afterwards."""
        self._thread.shutdown(wait=True)


@torch.inference_mode()
def _timed(work: Callable[[], T], times: DeviceTimes) -> T:
    """Run a step, or a part of one, and note its times."""
    times.started = times.started or time.monotonic()
    result = work()
    times.ended = time.monotonic()
    return result


class StreamClock:
    """Converts the end events of one stream's steps to host time, in the order of the steps.

    CUDA events measure durations, not times of day. Each end is placed by its distance from the end
    before it, and never after the moment at which the host saw it. So durations and gaps are exact
    (events resolve 0.5 us), and absolute times are late by at most the shortest delay at which the
    host has noticed a recent end (a thread's wake-up, about 0.1 ms).
    """

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, float] | None = None

    def place(self, end: torch.cuda.Event, seen: float) -> float:
        """The host time of `end`, which the host noticed at `seen`."""
        ended = seen
        if self._last is not None:
            before, ended_before = self._last
            seconds = before.elapsed_time(end) / 1e3
            ended = min(seen, ended_before + seconds * (1 + CLOCK_DRIFT))
        self._last = (end, ended)
        return ended


class EventStep:
    """A step between two events on a stream; all time between them counts as busy, gaps between
    kernels included. The events are read after the host has seen the second, so nothing waits."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        waiter: EventWaiter,
        clock: StreamClock,
        shape: StepShape | None,
    ) -> None:
        """To be called right before the step's first work is enqueued."""
        self._stream, self._waiter, self._clock, self._shape = stream, waiter, clock, shape
        self._submitted_s = time.perf_counter()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record(stream)  # passing the stream is faster than looking it up
        self._seen: float | None = None

    def end(self, collect: Collect) -> EventStep:
        """To be called right after the step's last work is enqueued."""
        self._collect = collect
        # Blocking: a waiting thread sleeps in the driver.
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


# Streams of closed engines, to be reused: torch keeps a cuBLAS workspace (64 MiB on Hopper) for
# every stream that ever ran a GEMM, so a new stream per engine would leak them.
_idle_streams: list[torch.cuda.Stream] = []


class StreamExecutor:
    """One CUDA stream and its waiter.

    Steps enter the stream object itself, in a third of the time of `torch.cuda.stream`. It keeps
    the state to restore, so only one thread may enter it at a time, and not recursively: the loop
    copies adapters while another thread ends a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _idle_streams.pop() if _idle_streams else torch.cuda.Stream(device)
        self._waiter = EventWaiter()
        self._clock = StreamClock()
        self._entering = Lock()

    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep:
        with self._entering, torch.inference_mode(), self.stream:
            return EventStep(self.stream, self._waiter, self._clock, shape).end(work())

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> EndStep[T]:
        with self._entering, torch.inference_mode(), self.stream:
            step, value = EventStep(self.stream, self._waiter, self._clock, shape), first()

        def end(rest: Callable[[T], Collect]) -> LaunchedStep:
            with self._entering, torch.inference_mode(), self.stream:
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


Executor = ThreadExecutor | StreamExecutor
