"""A blocking call off the loop, in a thread that ends with it.

The loop's default executor keeps its threads for ever, and the loop is the application's: what we
leave there would be left in its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Returns or raises as `work`. Cancelled, the call goes on, and its result is dropped."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm")
    try:
        result = await asyncio.get_running_loop().run_in_executor(thread, work, *args)
    except BaseException:
        thread.shutdown(wait=False)  # cancelled: the work ends by itself, the loop does not wait
        raise
    thread.shutdown()  # at once: its work is done
    return result
