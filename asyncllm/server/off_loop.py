"""Threads for what would hold the event loop: reading a large request, writing a large answer.

Both are Python code that shares one interpreter, so a second thread of either would finish nothing
earlier; each waits for its turn, and large answers do not keep requests waiting. What runs here
must not touch what belongs to the loop: engine and connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# From here on the way from a body to the engine's prompt may take milliseconds: a chat template
# takes 0.5 us a byte where messages are short. To ask a thread costs a tenth of one.
LARGE_BODY_BYTES = 8 * 1024


class OffLoop:
    def __init__(self) -> None:
        self._requests = ThreadPoolExecutor(1, "asyncllm-requests")  # no thread until it is asked
        self._answers = ThreadPoolExecutor(1, "asyncllm-answers")

    async def read(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. One that is cancelled before its turn never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._requests, work)

    async def write(self, work: Callable[[], T]) -> T:
        """As `read`, for answers."""
        return await asyncio.get_running_loop().run_in_executor(self._answers, work)

    def close(self) -> None:
        for threads in (self._requests, self._answers):
            threads.shutdown(wait=False, cancel_futures=True)
