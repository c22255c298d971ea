"""Draining: newcomers are refused, answers in progress end, and at last are ended."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asyncllm.errors import EngineDeadError
from asyncllm.server.serve import _stop_or_failure, drain
from tests.server.fake_engine import reply
from tests.server.http_harness import CHAT, HELLO, run, serving, until


def test_drain_lets_answers_end() -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.step_seconds = 0.005
            stream = asyncio.create_task(server.events(CHAT, {"messages": HELLO}))
            whole = asyncio.create_task(server.post(CHAT, {"messages": HELLO}))
            await until(lambda: len(server.engine.live) == 2)
            draining = asyncio.create_task(drain(server.service, 10))
            await until(lambda: server.service.draining)
            assert (await server.post(CHAT, {"messages": HELLO}))[0] == 503
            assert (await server.get("/health"))[0] == 503
            await draining
            assert (await stream)[-1] == "[DONE]"
            assert (await whole)[1]["choices"][0]["message"]["content"] == reply(0)

    run(test())


def test_drain_ends_what_takes_too_long() -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.step_seconds = 0.005
            stream = asyncio.create_task(server.events(CHAT, {"messages": HELLO}))
            whole = asyncio.create_task(server.post(CHAT, {"messages": HELLO}))
            await until(lambda: len(server.engine.live) == 2)
            server.engine.go.clear()
            started = time.monotonic()
            await drain(server.service, 0.05)
            assert time.monotonic() - started < 0.5
            assert (await stream)[-1]["error"]["code"] == "service_unavailable"
            assert (await whole)[0] == 503
            await server.quiet()
            assert len(server.engine.aborted) == 2

    run(test())


def test_a_lost_device_ends_the_server_with_an_error() -> None:
    class Engine:
        async def wait_failed(self) -> str:
            return "the device is lost"

    async def test() -> None:
        engine: Any = Engine()
        with pytest.raises(EngineDeadError, match="device is lost"):
            await _stop_or_failure(asyncio.Event(), engine)
        stop = asyncio.Event()
        stop.set()
        await _stop_or_failure(stop, engine)  # asked to stop: not an error

    run(test())
