"""How much of what clients send is looked at in one turn of the event loop: SLICE_SECONDS of it.

A turn runs whatever is ready, so 256 requests that come together would all be parsed, checked and
queued in one, while the engine, whose step ends meanwhile, waits for its end. Here what does not
fit into a slice waits: the engine waits for a slice or so, and the first of a burst are launched
while the others are read. Two things wait, each in the order of its coming: bytes, before they are
parsed, and requests, before their handlers begin; those come first, but behind what the handlers
before them have woken: an engine that was idle plans two turns after the first of a burst.
It knows neither HTTP nor the engine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable

SLICE_SECONDS = 0.001
WOKEN_PER_TURN = 8  # requests, of which those go on for which there is time


class Arrivals:
    """Of one server. At most one `read` waits for each of its connections."""

    def __init__(self) -> None:
        self._reads: deque[Callable[[], None]] = deque()
        self._requests: dict[int, asyncio.Future[None]] = {}  # by their place in the queue
        self._places = itertools.count()
        self._slice_end: float | None = None  # of this turn; None: nothing has come in it
        self._is_scheduled = False

    def take(self, read: Callable[[], None]) -> bool:
        """Whether the caller may read now. If not, `read` is called in its turn."""
        if not self._reads and not self._requests and self._has_time():
            return True
        self._reads.append(read)
        return False

    async def turn(self) -> None:
        """Return when it is the turn of the request that asks."""
        if not self._requests and self._has_time():
            return
        place, loop = next(self._places), asyncio.get_running_loop()
        while True:
            future = self._requests[place] = loop.create_future()
            self._schedule()
            try:
                await future
            finally:
                self._requests.pop(place, None)
            if self._has_time():
                return

    def _has_time(self) -> bool:
        """Whether this turn has; for the first to ask it has, however long that one takes."""
        now = time.monotonic()
        if self._slice_end is None:
            self._slice_end = now + SLICE_SECONDS
            self._schedule()
            return True
        return now < self._slice_end

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_scheduled, self._slice_end = False, None
        if self._requests:
            asyncio.get_running_loop().call_soon(self._wake)  # behind who is ready already
            return
        while self._reads and self._has_time():
            self._reads.popleft()()
        if self._reads:
            self._schedule()

    def _wake(self) -> None:
        for place in heapq.nsmallest(WOKEN_PER_TURN, self._requests):
            future = self._requests.pop(place)
            if not future.done():  # cancelled
                future.set_result(None)
        if self._reads or self._requests:
            self._schedule()
