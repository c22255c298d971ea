"""The process and its machine: its cores, threads that end, and where it may keep files."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CGROUP = Path("/sys/fs/cgroup")
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # cgroups v2, v1


def num_cores() -> int:
    """Cores that this process may run on, as far as its container pays for them; at least 1.

    Python's own counts know of no container's quota. Threads beyond it only use it up sooner, and
    then all of the process stands still until the next period. A part of a core counts for nothing.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for files in QUOTAS:
        try:
            quota, period = " ".join((CGROUP / file).read_text() for file in files).split()
            if int(quota) > 0:
                return max(min(cores, int(quota) // int(period)), 1)
        except (OSError, ValueError):  # no such file; or no quota: "max"
            continue
    return cores


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_folder() -> Path:
    """Where a start keeps compiled kernels and GEMM choices for the next: $XDG_CACHE_HOME/asyncllm.

    Raises `RuntimeError` where there is no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "asyncllm"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields where to write what `path` then becomes: whole, or not at all where this raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        yield made
        made.replace(path)


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Call what blocks, off the loop, in a thread that ends with it. Returns or raises as `work`.

    The loop's default executor keeps its threads for ever, and the loop is the application's.
    Cancelled, the call goes on, and its result is dropped.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm")
    try:
        result = await asyncio.get_running_loop().run_in_executor(thread, work, *args)
    except BaseException:
        thread.shutdown(wait=False)  # cancelled: the work ends by itself, the loop does not wait
        raise
    thread.shutdown()  # at once: its work is done
    return result
