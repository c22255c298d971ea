"""How many cores this process has: those it may run on, as far as its container pays for them.

Python's own counts know of no container's quota. Threads beyond it only use it up sooner, and then
all of the process stands still until the next period.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # cgroups v2, v1


def num_cores() -> int:
    """At least 1. A part of a core counts for nothing."""
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
