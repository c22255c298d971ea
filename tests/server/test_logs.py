"""The log lines: one per request, one of totals per interval."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.server.observability.logs import TEXT_FORMAT, JsonFormatter, RequestLog, StatsLog
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, run, serving
from tests.waiting import until


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


def test_stats_line(caplog: pytest.LogCaptureFixture) -> None:
    stats = SchedulerStats(
        num_running=2, num_waiting=1, num_pages=4, num_used_pages=1, prefix_cache_queries=10,
        prefix_cache_hits=5,
    )  # fmt: skip
    log = StatsLog(lambda: stats)
    log._since -= 10
    log.record(stats, IterationStats(num_prompt_tokens=1000, num_generation_tokens=500))
    with caplog.at_level(logging.INFO, "asyncllm"):
        log.log()
        stats.prefix_cache_queries, stats.prefix_cache_hits = 30, 20
        log.log()
    first, second = caplog.messages
    assert first == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, "
        "Avg generation throughput: 50.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, "
        "GPU KV cache usage: 25.0%, Prefix cache hit rate: 50.0%"
    )
    assert "prompt throughput: 0.0 tokens/s" in second
    assert "hit rate: 75.0%" in second


def test_json_lines() -> None:
    logger = logging.getLogger("tests.json")
    records: list[logging.LogRecord] = []
    logger.addFilter(lambda record: bool(records.append(record)))
    logger.error("%d requests", 3, extra={"fields": {"running": 3, "share": 0.5}})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it failed")
    plain, failed = (JsonFormatter().format(record) for record in records)
    entry = orjson.loads(plain)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "error", "logger": "tests.json", "message": "3 requests", "running": 3,
        "share": 0.5,
    }  # fmt: skip
    assert "\n" not in failed
    assert "ValueError: two\nlines" in orjson.loads(failed)["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_prompt_no_answer_and_no_key_in_any_log(
    caplog: pytest.LogCaptureFixture, log_format: str
) -> None:
    secret = "sk-do-not-log"

    async def test() -> None:
        async with serving(api_key=[secret]) as server:
            log = StatsLog(server.engine.stats)
            server.engine.stat_loggers += [RequestLog(), log]
            bearer = {"Authorization": f"Bearer {secret}"}
            prompts = ["a private prompt", "a private prompt <fail>", "a private prompt <raise>"]
            for prompt in prompts:
                for stream in (True, False):
                    body = {"prompt": prompt, "stream": stream}
                    async with server.session.post(
                        server.url + COMPLETIONS, json=body, headers=bearer
                    ) as response:
                        await response.read()
            for wrong in ({"prompt": "a private prompt", "n": "x"}, {"prompt": [["a private"]]}):
                await server.post(COMPLETIONS, wrong, **bearer)
            await server.post(COMPLETIONS, {"prompt": "x"}, Authorization=f"Bearer {secret}-no")
            await server.quiet()
            log.log()

    with caplog.at_level(logging.DEBUG):
        run(test())
    formatter = JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    lines = [formatter.format(record) for record in caplog.records]
    assert sum("prompt tokens" in line for line in lines) >= 4
    assert any("prompt throughput" in line for line in lines)
    for line in lines:
        assert secret not in line and "private" not in line and "Answer 0" not in line, line


def test_idle_time_is_no_part_of_the_rates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncllm.server.observability.logs.STATS_INTERVAL_SECONDS", 0.01)
    stats = SchedulerStats()
    log = StatsLog(lambda: stats)
    log._since = started = log._since - 1e6  # started long ago

    async def test() -> None:
        task = asyncio.create_task(log.run())
        await until(lambda: log._since > started)
        log.record(stats, IterationStats(num_prompt_tokens=1000))
        await until(lambda: caplog.messages)
        task.cancel()

    with caplog.at_level(logging.INFO, "asyncllm"):
        run(test())
    (line,) = caplog.messages
    assert float(line.split()[5]) > 1  # 1000 tokens in 11 days and a moment: not of the 11 days
