"""Where a step's device work runs and how its end is awaited; nothing of what the work is.

`submit(work)` gives the device one step. `work()` does it and returns `collect`, which reads the
results once the device is done. Steps run in the order of their submission, always: that order
is what makes slots and pages reusable at once (see scheduler.py). `begin(first)` gives it the first
part of a step, whose `end(rest)` may come later and from another thread, before anything else.
Steps of one `shape` last about as long, which says how long the next of them is waited for.

  ThreadExecutor  the CPU: one thread is the stream; torch releases the GIL inside its kernels
  StreamExecutor  CUDA: `work` only enqueues on one stream, from the event loop's own thread
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

import torch

from asyncllm.step_plan import StepShape
from asyncllm.types import StepResult, TokenMasks
from asyncllm.worker.event_waiter import EventWaiter
from asyncllm.worker.step_timer import DeviceTimes, StepTimer, StreamClock

Collect = Callable[[], StepResult]
Work = Callable[[], Collect]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class LaunchedStep(Protocol):
    async def wait(self) -> StepResult: ...

    def device_times(self) -> DeviceTimes:
        """When the device worked on it; after `wait`."""
        ...


class BegunStep(Protocol[T_co]):
    """A step that the device has the first part of."""

    def end(self, rest: Callable[[T_co], Collect]) -> LaunchedStep:
        """Give it the rest, which gets what the first part returned."""
        ...


class HostStep:
    """A step whose forward pass is launched: what is sampled from waits on the device for what the
    host has to say. `sample`, once, launches the rest; then `wait`."""

    def __init__(self, end: Callable[[TokenMasks], LaunchedStep]) -> None:
        self._end = end
        self._whole: LaunchedStep | None = None

    def sample(self, masks: TokenMasks) -> None:
        """From any thread, all steps before being finished, and before any other launch."""
        assert self._whole is None, "a step is sampled twice"
        self._whole = self._end(masks)

    async def wait(self) -> StepResult:
        assert self._whole is not None, "a step is awaited that nobody samples"
        return await self._whole.wait()

    def device_times(self) -> DeviceTimes:
        assert self._whole is not None
        return self._whole.device_times()


class Executor(Protocol):
    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep: ...

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> BegunStep[T]: ...

    def between_steps(self) -> AbstractContextManager[None]:
        """Work of the calling thread, after all steps so far; done when it is left."""
        ...

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


class _ThreadBegun(Generic[T]):
    def __init__(self, thread: ThreadPoolExecutor, first: Callable[[], T]) -> None:
        self._thread, self._times = thread, DeviceTimes()
        self._first = thread.submit(_begin, first, self._times)

    def end(self, rest: Callable[[T], Collect]) -> LaunchedStep:
        future = self._thread.submit(_end, self._first, rest, self._times)
        return _ThreadStep(future, self._times)


class ThreadExecutor:
    """The CPU as a device with one stream."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-cpu")

    def submit(self, work: Work, shape: StepShape | None = None) -> LaunchedStep:
        times = DeviceTimes()
        return _ThreadStep(self._thread.submit(_run, work, times), times)

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> BegunStep[T]:
        return _ThreadBegun(self._thread, first)

    def between_steps(self) -> AbstractContextManager[None]:
        self.drain()
        return nullcontext()

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


@torch.inference_mode()
def _begin(first: Callable[[], T], times: DeviceTimes) -> T:
    times.started = time.monotonic()
    return first()


@torch.inference_mode()
def _end(first: Future[T], rest: Callable[[T], Collect], times: DeviceTimes) -> StepResult:
    result = rest(first.result())()  # done: it was this thread's job before; raises what it raised
    times.ended = time.monotonic()
    return result


class EventStep:
    """A step that `done` ends. Made right after the last of its work was enqueued."""

    def __init__(
        self,
        done: torch.cuda.Event,
        collect: Collect,
        waiter: EventWaiter,
        timer: StepTimer,
        shape: StepShape | None,
    ) -> None:
        self._done, self._collect, self._waiter = done, collect, waiter
        self._timer, self._shape = timer, shape
        self._submitted_s = timer.submitted_s

    async def wait(self) -> StepResult:
        await self._waiter.wait(self._done, self._submitted_s, self._shape)
        self._timer.see()
        return self._collect()

    def device_times(self) -> DeviceTimes:
        return self._timer.times(self._done)


# Streams of closed engines, for the next one: torch keeps cuBLAS workspaces (64 MiB on Hopper) for
# every stream that ever ran a product, so a new stream per engine would leak them.
_idle_streams: list[torch.cuda.Stream] = []


class _StreamBegun(Generic[T]):
    def __init__(
        self, executor: StreamExecutor, timer: StepTimer, value: T, shape: StepShape | None
    ) -> None:
        self._executor, self._timer, self._value, self._shape = executor, timer, value, shape

    def end(self, rest: Callable[[T], Collect]) -> LaunchedStep:
        with torch.inference_mode(), self._executor.stream:
            return self._executor.close_step(self._timer, rest(self._value), self._shape)


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
            return self.close_step(StepTimer(self._clock, self.stream), work(), shape)

    def begin(self, first: Callable[[], T], shape: StepShape | None = None) -> BegunStep[T]:
        with torch.inference_mode(), self.stream:
            return _StreamBegun(self, StepTimer(self._clock, self.stream), first(), shape)

    def close_step(self, timer: StepTimer, collect: Collect, shape: StepShape | None) -> EventStep:
        """The end of a step, on the current stream."""
        done = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits sleeps in the driver
        done.record(self.stream)
        return EventStep(done, collect, self._waiter, timer, shape)

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
