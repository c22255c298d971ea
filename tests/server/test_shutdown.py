"""Draining: newcomers are refused, answers in progress end, and at last are ended."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import aiohttp
import pytest

from asyncllm.errors import EngineDeadError
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.listener import Listener
from asyncllm.server.serve import _stop_or_failure, drain, serve
from tests.server.fake_engine import FakeEngine, reply
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
            server.engine.go.clear()  # neither would end by itself
            await drain(server.service, 0.05)
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


@pytest.mark.slow
def test_health_says_loading_until_the_model_is_there() -> None:
    class Slow(FakeEngine):
        startup: ClassVar[dict[str, Any]] = {"model": "slow"}

        def __init__(self) -> None:
            super().__init__()
            self.unhealthy = "loading"
            self.loaded = asyncio.Event()

        async def start(self) -> None:
            await self.loaded.wait()
            self.unhealthy = None
            await super().start()

        async def wait_failed(self) -> str:
            await asyncio.Event().wait()
            raise AssertionError("never")

    async def test() -> None:
        engine: Any = Slow()
        args = ServerArgs(port=0, disable_log_stats=True)
        listener = Listener.bind(args)
        assert listener.sock is not None
        url = f"http://127.0.0.1:{listener.sock.getsockname()[1]}"
        server = asyncio.create_task(serve(engine, args, listener, time.perf_counter()))
        async with aiohttp.ClientSession() as session:

            async def health() -> tuple[int, str]:
                try:
                    async with session.get(f"{url}/health") as response:
                        return response.status, await response.text()
                except aiohttp.ClientConnectionError:
                    return 0, "not listening yet"

            while (await health())[0] == 0:  # noqa: ASYNC110 (it has no event to wait for)
                await asyncio.sleep(0.002)
            status, body = await health()
            assert status == 503 and "loading" in body
            async with session.post(url + CHAT, json={"messages": HELLO}) as response:
                assert response.status == 503 and response.headers["Retry-After"]
                error = (await response.json())["error"]
            assert error["message"] == "the model is still loading"
            engine.loaded.set()
            while (await health())[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        server.cancel()
        await asyncio.wait([server])

    run(test())
