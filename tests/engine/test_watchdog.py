"""Stalls: noticed after the patience, dumped once, over with the next step."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.engine import watchdog
from asyncllm.engine.watchdog import Watchdog
from tests.waiting import until


def dumps(caplog: pytest.LogCaptureFixture) -> list[Path]:
    found = [re.search(r"dumped to (\S+)", message) for message in caplog.messages]
    return [Path(match.group(1)) for match in found if match]


def test_only_live_requests_without_steps_are_a_stall(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(watchdog, "INTERVAL_SECONDS", 3600)  # the test looks, not the thread

    async def test() -> None:
        live = 0
        dog = Watchdog(30, lambda: live, lambda: "3 pages used")
        dog.check(100)
        dog.check(1000)  # idle for long
        assert dog.stalled is None
        live = 2
        dog.check(1029)
        assert dog.stalled is None
        dog.step_done()
        dog.check(1040)  # a step since: the patience begins anew
        dog.check(1069)
        assert dog.stalled is None
        dog.check(1070)
        assert dog.stalled == "no step has finished for 30 s with 2 requests in progress"
        dog.check(1100)
        (dump,) = dumps(caplog)  # once per stall
        text = dump.read_text()
        assert "3 pages used" in text and "Thread" in text and "Task" in text
        dog.step_done()
        dog.check(1101)
        assert dog.stalled is None
        dog.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())


def test_a_dump_that_cannot_be_written_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(watchdog, "INTERVAL_SECONDS", 0.001)

    async def test() -> None:
        dog = Watchdog(0.001, lambda: 1, lambda: "")
        await until(lambda: "its state cannot be dumped" in caplog.text)
        assert dog.stalled is not None and dog.stalled in caplog.text
        dog.step_done()
        await until(lambda: "steps finish again" in caplog.text)
        dog.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())


def test_a_step_that_hangs_makes_the_engine_unhealthy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(watchdog, "INTERVAL_SECONDS", 0.01)

    async def test() -> None:
        async with AsyncLLMEngine("tiny", swap_space=0, watchdog_timeout=0.05) as engine:
            secret = "Once upon a time"
            assert engine._core is not None
            worker, go = engine._core.worker, asyncio.Event()
            launch = worker.launch

            class Hanging:
                def __init__(self, step: object) -> None:
                    self.step = step

                async def wait(self) -> object:
                    await go.wait()
                    return await self.step.wait()  # type: ignore[attr-defined]

                def device_times(self) -> object:
                    return self.step.device_times()  # type: ignore[attr-defined]

            monkeypatch.setattr(worker, "launch", lambda plan: Hanging(launch(plan)))
            answer = asyncio.ensure_future(engine.generate(secret, SamplingParams(max_tokens=3)))
            await until(lambda: engine.health() is not None)
            assert "no step has finished for 0.05 s with 1 requests" in (engine.health() or "")
            go.set()
            assert (await answer).finished
            await until(lambda: engine.health() is None)
            text = dumps(caplog)[0].read_text()
            assert secret not in text and "pages" in text

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())
