"""The machine that this process runs on: how many cores it may use, and where it may keep files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
