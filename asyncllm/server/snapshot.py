"""What the dashboard shows, taken from the engine and from its steps while somebody looks.

`SnapshotTaker` observes the engine as a `StatLogger` between `start` and `stop`. Per step it keeps
one row and appends whole lists; everything that costs more happens twice a second in `next`.
Rates and rows cover the time since the last snapshot, percentiles the last RECENT samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.stats import IterationStats, SchedulerStats

RECENT = 2048  # samples behind a percentile
MAX_STEPS = 512  # rows of one snapshot; older ones are left out
PERCENTILES = (50, 90, 99)
_LATENCIES = ("ttft", "itl", "e2e")


class SnapshotTaker:
    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._steps: deque[tuple[float, float, int, int]] = deque(maxlen=MAX_STEPS)
        self._recent: dict[str, deque[float]] = {}
        self._totals = [0, 0, 0]  # prompt tokens, generated tokens, finished requests
        self._last_step = 0.0
        self._taken = 0.0

    def start(self) -> None:
        self._steps.clear()
        self._recent = {name: deque(maxlen=RECENT) for name in _LATENCIES}
        self._totals = [0, 0, 0]
        self._taken = self._last_step = time.monotonic()
        self._engine.stat_loggers.append(self)

    def stop(self) -> None:
        self._engine.stat_loggers.remove(self)

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        now = time.monotonic()
        prompt, generated = iteration.num_prompt_tokens, iteration.num_generation_tokens
        if prompt or generated:
            self._steps.append((now, now - self._last_step, prompt, generated))
        self._last_step = now
        self._totals[0] += prompt
        self._totals[1] += generated
        self._totals[2] += len(iteration.finished)
        self._recent["ttft"].extend(iteration.time_to_first_tokens)
        self._recent["itl"].extend(iteration.inter_token_latencies)
        self._recent["e2e"].extend(request.e2e_time for request in iteration.finished)

    def first(self) -> dict[str, Any]:
        """What does not change, then what `next` says, with no time passed."""
        startup = self._engine.startup
        names = ("architecture", "device", "dtype", "attention_backend", "max_model_len")
        return {"server": {name: startup.get(name) for name in names}, **self._state()}

    def next(self) -> dict[str, Any]:
        """The state now and what happened since the last call. Times in ms."""
        now = time.monotonic()
        seconds = max(now - self._taken, 1e-3)
        prompt, generated, finished = self._totals
        steps = [
            (round((now - end) * 1e3, 1), round(took * 1e3, 2), prompt, generated)
            for end, took, prompt, generated in self._steps
        ]
        self._taken, self._totals = now, [0, 0, 0]
        self._steps.clear()
        return {
            **self._state(),
            "seconds": seconds,
            "prompt_tokens": prompt,
            "generation_tokens": generated,
            "finished": finished,
            "steps": steps,
            "latency_ms": {name: _percentiles(values) for name, values in self._recent.items()},
        }

    def _state(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "swapped": stats.num_swapped,
            "preemptions": stats.num_preemptions_swap + stats.num_preemptions_recompute,
            "prefix_cache": [stats.prefix_cache_hits, stats.prefix_cache_queries],
            "kv": {"pages": stats.num_pages, "used": stats.num_used_pages},
        }


def _percentiles(values: Sequence[float]) -> list[float] | None:
    """Of seconds, in ms; None without any."""
    if not values:
        return None
    return [round(p, 3) for p in np.percentile(np.fromiter(values, float), PERCENTILES) * 1e3]
