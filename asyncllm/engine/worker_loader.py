"""Makes workers in a thread, and closes those that nobody waits for any more.

A model cannot be stopped while it loads. Where the caller is cancelled, the thread goes on to the
end and then closes the worker itself, so that its threads and its device memory are given back even
if the loop has ended by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from asyncllm.engine.own_thread import in_own_thread
from asyncllm.worker.worker import Worker


class WorkerLoader:
    """One load at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # of the last load

    async def load(self, make: Callable[[], Worker]) -> Worker:
        """Where the load before was dropped, after its end: memory need not hold two."""
        await self.join()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-load")
        loading = self._thread.submit(make)
        self._thread.shutdown(wait=False)  # it ends with this load
        try:
            return await asyncio.wrap_future(loading)
        except BaseException:
            loading.add_done_callback(_close)
            raise

    async def join(self) -> None:
        """Until no thread is left, nor a worker that was dropped."""
        if self._thread is not None:
            await in_own_thread(self._thread.shutdown)
            self._thread = None


def _close(loading: Future[Worker]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
