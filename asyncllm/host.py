"""The process and its machine: cores, memory, cache folder, and threads beside the loop's."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CGROUP = Path("/sys/fs/cgroup")
TURN_PAUSE_S = 1e-4  # wakes whoever waits for the GIL
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # cgroups v2, v1


def num_cores() -> int:
    """The cores that this process may use, limited by its container's quota; at least 1.

    Python's own counts ignore the quota. With more threads the quota is used up sooner, and then
    the whole process is stopped until the next period. A fraction of a core is ignored.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for files in QUOTAS:
        try:
            quota, period = " ".join((CGROUP / file).read_text() for file in files).split()
            if int(quota) > 0:
                return max(min(cores, int(quota) // int(period)), 1)
        except (OSError, ValueError):  # no such file, or no quota ("max")
            continue
    return cores


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_folder() -> Path:
    """The folder for compiled kernels, autotuned GEMMs, unpacked models: $XDG_CACHE_HOME/asyncllm.

    Raises `RuntimeError` without a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncllm"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write. At the end it replaces `path` atomically, unless the body
    raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        yield made
        made.replace(path)


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Run a blocking function in a thread that ends with it. Returns or raises as `work` does.

    The loop's default executor is the application's, and keeps its threads. If this is cancelled,
    `work` continues, and its result is ignored.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm")
    try:
        result = await asyncio.get_running_loop().run_in_executor(thread, work, *args)
    except BaseException:
        thread.shutdown(wait=False)  # if cancelled, the loop does not wait for the work
        raise
    thread.shutdown()  # returns at once, as the work is done
    return result


def in_turns(items: Iterable[T], size: int = 1) -> Iterator[T]:
    """The items, for a thread beside the event loop's: after each `size` of them it pauses.

    A thread that runs many short calls keeps the GIL from the loop for 5 ms at a time: that is
    Python's interval, and a call that gives the GIL up for microseconds has it back before another
    thread has woken up. In a pause the loop has it at once.
    """
    for number, item in enumerate(items, 1):
        yield item
        if number % size == 0:
            time.sleep(TURN_PAUSE_S)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection for a while."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
