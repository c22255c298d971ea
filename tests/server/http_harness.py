"""A server over the fake engine (or the real one) on a free local port, in the test's own loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from asyncllm.server.app import build_app
from asyncllm.server.args import ServerArgs
from asyncllm.server.http.bodies import OFF_LOOP, OffLoop
from asyncllm.server.http.listener import Listener
from asyncllm.server.service import SERVICE, Service
from tests import waiting
from tests.server.fake_engine import FakeEngine
from tests.waiting import until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test in the loop that the server runs in."""
    waiting.run(test, on=uvloop.run)


@dataclass
class Server:
    url: str
    port: int
    engine: Any  # FakeEngine, unless a test brings the real one
    service: Service
    off_loop: OffLoop
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and parsed body."""
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text[:1] == "{" else text

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream: parsed JSON, and "[DONE]"."""
        body = {"stream": True, **body}
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.text())

    async def named_events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream that names them, by the names that are in their data."""
        async with self.session.post(self.url + path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        assert text.endswith("\n\n")
        events = []
        for frame in text.removesuffix("\n\n").split("\n\n"):
            name, data = frame.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    async def quiet(self) -> None:
        """Until the engine and the server have nothing left to do."""
        await until(lambda: not self.engine.live and not self.service.num_live)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines), text
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@asynccontextmanager
async def serving(
    engine: Any = None, small_buffers: bool = False, **args: Any
) -> AsyncIterator[Server]:
    """Asserts at the end that no answer, request or task is left."""
    engine = engine or FakeEngine()
    tasks_before = asyncio.all_tasks()
    await engine.start()
    server_args = ServerArgs(**{"port": 0, **args})
    listener = Listener.bind(server_args)
    if listener.sock is not None and small_buffers:  # accepted connections inherit it
        listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    app = build_app(engine, server_args)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await listener.start(runner)
    port = listener.sock.getsockname()[1] if listener.sock is not None else 0
    try:
        async with aiohttp.ClientSession() as session:
            yield Server(listener.url, port, engine, app[SERVICE], app[OFF_LOOP], session)
        # Every client has gone, and so its answer.
        await until(lambda: not app[SERVICE].num_live)
        if engine.health() is None:
            await until(lambda: not engine.stats().num_running)
            engine.check_idle()
    finally:
        listener.close()
        await runner.cleanup()
        await engine.aclose()
    assert not getattr(engine, "sink_errors", None)
    await until(lambda: asyncio.all_tasks() <= tasks_before)
