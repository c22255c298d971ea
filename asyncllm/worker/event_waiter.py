"""Waiting for the device without blocking the event loop and without burning a core.

A step is awaited coarsely, by a thread that sits in the driver without the GIL; its wake-up costs
50 to 100 us and more in a virtual machine. A step that is about to end is polled instead, between
other turns of the loop: steps run one after the other and take about as long as the last of their
size, so the end is known to a few per cent. Where somebody waits for a first token, "about" begins
earlier. Polling is bounded by the two together per step; idle costs nothing. (Letting the thread
sleep until shortly before the end polls them all, but one slow step then makes the next ones slow.)
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

POLL_S = 200e-6  # before and after the expected end
PROMPTS_POLL_S = 2e-3  # before that of a step with prompts


class DeviceEvent(Protocol):
    """What is used of a `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


_Waiting = tuple[DeviceEvent, asyncio.AbstractEventLoop, asyncio.Future[None]]


class EventWaiter:
    """For the events of one stream, awaited in their order. Owns one thread until `close`."""

    def __init__(self) -> None:
        self._last_end_s = 0.0  # of the clock, as seen by the host
        self._step_s: dict[int, float] = {}  # the last duration by size; few sizes, and bounded
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asyncllm-wait", daemon=True)
        self._thread.start()

    async def wait(self, event: DeviceEvent, submitted_s: float, size: int) -> None:
        """Until the event. `submitted_s`: by `perf_counter`. Raises what the device raised.

        `size`: of the step, such that those of one size last about as long; 0 if only decodes.
        """
        if event.query():
            self._last_end_s = time.perf_counter()  # or earlier: no measure of a step
            return
        start_s = max(submitted_s, self._last_end_s)
        due_s = start_s + self._step_s.get(size, math.inf)  # not known: no end is near
        before_s = PROMPTS_POLL_S if size else POLL_S
        while -POLL_S < due_s - time.perf_counter() < before_s:
            await asyncio.sleep(0)
            if event.query():
                break
        else:
            await self._in_thread(event)
        self._last_end_s = time.perf_counter()
        self._step_s[size] = self._last_end_s - start_s

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    async def _in_thread(self, event: DeviceEvent) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._queue.put((event, loop, done))
        await done

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            event, loop, done = waiting
            error: Exception | None = None
            try:
                event.synchronize()
            except Exception as raised:  # it belongs to who awaits
                error = raised
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody awaits
                loop.call_soon_threadsafe(_resolve, done, error)


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
