"""The log lines: one per request, one of totals per interval."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.server.logs import RequestLog, StatsLog
from tests.server.http_harness import CHAT, HELLO, run, serving


def test_request_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.stat_loggers.append(RequestLog())
            await server.post(CHAT, {"messages": HELLO, "max_tokens": 3})

    with caplog.at_level(logging.INFO, "asyncllm"):
        run(test())
    (line,) = caplog.messages
    assert line.startswith("chatcmpl-")
    assert "length: 22 prompt tokens (0 cached), 3 generated, queued 1.0 ms" in line
    assert "Hello" not in line


def test_stats_line() -> None:
    stats = SchedulerStats(
        num_running=2, num_waiting=1, num_pages=4, num_used_pages=1, prefix_cache_queries=10,
        prefix_cache_hits=5,
    )  # fmt: skip
    log = StatsLog(lambda: stats)
    log._since -= 10
    log.record(stats, IterationStats(num_prompt_tokens=1000, num_generation_tokens=500))
    line = log.line()
    assert line.startswith("prompt 100.0 tokens/s, generation 50.0 tokens/s, running 2, waiting 1")
    assert line.endswith("KV cache 25.0%, prefix cache hits 50.0%")
    assert log.line().startswith("prompt 0.0 tokens/s")


def test_idle_time_is_no_part_of_the_rates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncllm.server.logs.STATS_INTERVAL_SECONDS", 0.01)
    stats = SchedulerStats()
    log = StatsLog(lambda: stats)
    log._since -= 3600  # started an hour ago

    async def test() -> None:
        task = asyncio.create_task(log.run())
        await asyncio.sleep(0.05)
        log.record(stats, IterationStats(num_prompt_tokens=1000))
        await asyncio.sleep(0.05)
        task.cancel()

    with caplog.at_level(logging.INFO, "asyncllm"):
        run(test())
    (line,) = caplog.messages
    assert float(line.split()[1]) > 1000  # 1000 tokens in far less than a second
