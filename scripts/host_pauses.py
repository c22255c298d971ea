"""The garbage collector's pauses, for bench_host.py: how many, how long, of which generation."""

from __future__ import annotations

import gc
import time
from typing import Any


class CollectorPauses:
    """Between `__enter__` and `__exit__`; milliseconds of the loop's thread."""

    def __init__(self) -> None:
        self._started_s = 0.0
        self._pauses_ms: dict[int, list[float]] = {}
        self._num_collected = 0

    def __enter__(self) -> CollectorPauses:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_s = time.thread_time()
            return
        spent_ms = (time.thread_time() - self._started_s) * 1e3
        self._pauses_ms.setdefault(info["generation"], []).append(spent_ms)
        self._num_collected += info["collected"]

    def summary(self) -> dict[str, Any]:
        """Per generation their number, mean and longest; and how many objects were garbage."""
        summary: dict[str, Any] = {"objects": self._num_collected}
        for generation, pauses in sorted(self._pauses_ms.items()):
            summary[f"generation_{generation}"] = {
                "number": len(pauses),
                "mean_ms": round(sum(pauses) / len(pauses), 3),
                "longest_ms": round(max(pauses), 3),
            }
        return summary
