"""What the server says while it runs: a line per finished request, and one of totals now and then.

Both are `StatLogger`s. No prompt, no answer and no key is ever logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from asyncllm.engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

logger = logging.getLogger("asyncllm")

STATS_INTERVAL_SECONDS = 10.0


class RequestLog:
    """--enable-log-requests"""

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        for request in iteration.finished:
            logger.info("%s", _request_line(request))


class StatsLog:
    """Totals of the last interval, as long as there is work, and once when it has ended."""

    def __init__(self, stats: Callable[[], SchedulerStats]) -> None:
        self._stats = stats
        self._since = time.monotonic()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._worked = False

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        self._worked = True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STATS_INTERVAL_SECONDS)
            if self._worked:
                logger.info("%s", self.line())
            else:
                self._since = time.monotonic()  # idle time is no part of the next rates

    def line(self) -> str:
        """The line for the time since the last one; starts the next interval."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        stats = self._stats()
        hits = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
        text = (
            f"prompt {self._prompt_tokens / seconds:.1f} tokens/s, "
            f"generation {self._generation_tokens / seconds:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting + stats.num_swapped}, "
            f"KV cache {stats.kv_cache_usage:.1%}, prefix cache hits {hits:.1%}"
        )
        self._since = now
        self._prompt_tokens = self._generation_tokens = 0
        self._worked = bool(stats.num_running or stats.num_waiting)
        return text


def _request_line(request: FinishedRequestStats) -> str:
    return (
        f"{request.request_id} {request.finish_reason}: "
        f"{request.num_prompt_tokens} prompt tokens ({request.num_cached_tokens} cached), "
        f"{request.num_generation_tokens} generated, "
        f"queued {_ms(request.queue_time)}, first token {_ms(request.time_to_first_token)}, "
        f"per token {_ms(request.time_per_output_token)}, total {_ms(request.e2e_time)}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
