"""How late the event loop is: a timer that is due every 50 ms while steps run, and none when idle.

A callback that holds the loop for long delays every stream at once; this shows it whoever did it,
HTTP handlers and the embedding application included. uvloop's timers tick in milliseconds and may
fire up to one early, so lags under a millisecond read as zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL_S = 0.05


class LoopLag:
    """`observe` is told each lag in seconds. Made on the loop that it watches."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Sample once more; called once per step."""
        if self._timer is None:
            due = time.monotonic() + INTERVAL_S
            self._timer = self._loop.call_later(INTERVAL_S, self._fire, due)

    def _fire(self, due: float) -> None:
        self._timer = None
        self._observe(max(time.monotonic() - due, 0.0))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
