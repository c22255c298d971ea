"""Waits for the device without blocking the event loop, and without occupying a core.

A thread waits in the driver, without the GIL. Its wake-up takes 50 to 100 us, and more in a virtual
machine. So a step that is about to end is polled instead, between other callbacks of the loop.
Steps run one after another and take about as long as the last one of the same shape, so the end is
known to a few per cent. Polling starts earlier for steps with prompts, as a client may wait for its
first token. The polling time per step is bounded, and idle time costs nothing. (If the thread slept
until shortly before the end, all steps could be polled, but one slow step would delay the next.)

The thread needs the GIL to report the end, and a busy loop releases it every 5 ms at best. So after
the expected end the loop checks the event itself, too.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from asyncllm.step_plan import StepKind, StepShape

POLL_S = 200e-6  # before and after the expected end
PROMPTS_POLL_S = 2e-3  # before the expected end of a step with prompts
LOOK_S = 1e-3  # between two checks while the thread waits


class DeviceEvent(Protocol):
    """The used part of `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


_Waiting = tuple[DeviceEvent, asyncio.AbstractEventLoop, asyncio.Future[None]]


class EventWaiter:
    """Awaits the events of a stream, in their order. Owns a thread until `close`."""

    def __init__(self) -> None:
        self._last_end_s = 0.0  # when the host noticed the last end
        # The last duration of each shape; None stands for decode steps of any number of rows.
        self._step_s: dict[StepShape | None, float] = {}
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asyncllm-wait", daemon=True)
        self._thread.start()

    async def wait(self, event: DeviceEvent, submitted_s: float, shape: StepShape | None) -> None:
        """Wait for the event. Raises what the device raised.

        submitted_s: by `perf_counter`. shape: the step's; None: its duration is unknown.
        """
        if event.query():
            self._last_end_s = time.perf_counter()  # or earlier, so not used as a duration
            return
        start_s = max(submitted_s, self._last_end_s)
        is_decode = shape is None or shape.kind is StepKind.DECODE
        key = None if is_decode else shape
        due_s = start_s + self._step_s.get(key, math.inf)  # unknown: it is not polled
        before_s = POLL_S if is_decode else PROMPTS_POLL_S
        while -POLL_S < due_s - time.perf_counter() < before_s:
            await asyncio.sleep(0)
            if event.query():
                break
        else:
            await self._in_thread(event, due_s)
        self._last_end_s = time.perf_counter()
        self._step_s[key] = self._last_end_s - start_s

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    async def _in_thread(self, event: DeviceEvent, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put((event, loop, done))
        left_s = due_s - time.perf_counter()
        first_s = max(left_s, LOOK_S) if left_s < math.inf else LOOK_S
        timer = loop.call_later(first_s, self._look, event, done)
        try:
            await done
        finally:
            timer.cancel()

    def _look(self, event: DeviceEvent, done: asyncio.Future[None]) -> None:
        if done.done():
            return
        try:
            if event.query():
                done.set_result(None)
            else:
                asyncio.get_running_loop().call_later(LOOK_S, self._look, event, done)
        except Exception as error:  # passed to the awaiting task
            done.set_exception(error)

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            event, loop, done = waiting
            error: Exception | None = None
            try:
                event.synchronize()
            except Exception as raised:  # passed to the awaiting task
                error = raised
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(_resolve, done, error)


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
