"""The server's log lines: one per finished request, one of totals now and then; text or JSON.

`RequestLog` and `StatsLog` are `StatLogger`s. No prompt, no response and no key is ever logged. The
line of totals has vLLM's wording, for what reads it. JSON lines carry the numbers as fields too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import orjson

from asyncllm.engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

logger = logging.getLogger("asyncllm")

STATS_INTERVAL_SECONDS = 10.0


class RequestLog:
    """--enable-log-requests"""

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        for request in iteration.finished:
            logger.info("%s", _request_line(request), extra={"fields": asdict(request)})


class StatsLog:
    """Totals of the last interval, as long as there is work, and once when it has ended."""

    def __init__(self, stats: Callable[[], SchedulerStats]) -> None:
        self._stats = stats
        self._since = time.monotonic()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._queries = self._hits = 0  # of the prefix cache, at the last line
        self._worked = False

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        self._worked = True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STATS_INTERVAL_SECONDS)
            if self._worked:
                self.log()
            else:
                self._since = time.monotonic()  # idle time is no part of the next rates

    def log(self) -> None:
        fields = self.take()
        logger.info(
            "Engine 000: Avg prompt throughput: %.1f tokens/s, "
            "Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, "
            "GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            *fields.values(),
            extra={"fields": fields},
        )

    def take(self) -> dict[str, Any]:
        """The line's numbers, for the time since the last one; starts the next interval.

        The hit rate is the interval's; 0 where nothing was looked up.
        """
        now, stats = time.monotonic(), self._stats()
        seconds = max(now - self._since, 1e-9)
        # An engine's process that was started again counts from 0.
        queries = max(stats.prefix_cache_queries - self._queries, 0)
        hits = min(max(stats.prefix_cache_hits - self._hits, 0), queries)
        fields = {
            "prompt_tokens_per_s": self._prompt_tokens / seconds,
            "generation_tokens_per_s": self._generation_tokens / seconds,
            "running": stats.num_running,
            "waiting": stats.num_waiting + stats.num_swapped,
            "kv_cache_usage_percent": stats.kv_cache_usage * 100,
            "prefix_cache_hit_percent": hits / queries * 100 if queries else 0.0,
        }
        self._since = now
        self._prompt_tokens = self._generation_tokens = 0
        self._queries, self._hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        self._worked = bool(stats.num_running or stats.num_waiting)
        return fields


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


TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message; beside them what a call gave as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


def set_up_logging(level: str, log_format: str) -> None:
    """The process's root logger, to stderr. For commands, not for applications that embed us."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
