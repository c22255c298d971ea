"""GET /dashboard/events: what the engine is doing, twice a second, to everyone who looks.

One timer serves all viewers: it takes one `engine.snapshot()`, renders it once and pushes the same
bytes to each. It starts with the first viewer and ends with the last, so a server that nobody
watches does nothing. A viewer who reads too slowly is dropped by its `SSEStream`.
"""

from __future__ import annotations

import asyncio

import orjson
from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.errors import EngineDeadError
from asyncllm.server.errors import ApiError
from asyncllm.server.sse import SSEStream

PERIOD_SECONDS = 0.5
MAX_VIEWERS = 32
NUM_STEPS = 96  # as many bars as the panel has room for
_STATIC = ("architecture", "device", "dtype", "attention_backend", "max_model_len")


class Dashboard:
    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._viewers: set[SSEStream] = set()
        self._timer: asyncio.Task[None] | None = None

    async def watch(self, http: web.Request) -> web.StreamResponse:
        """Stream to one viewer until it leaves or the server closes."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(429, f"{MAX_VIEWERS} viewers watch the dashboard already")
        sse = SSEStream(http)
        try:
            self._join(sse)
            await sse.open()
            await sse.run()
        except ConnectionError:
            pass  # the viewer is gone or was dropped
        finally:
            self._leave(sse)
        return sse.response

    async def close(self, app: web.Application) -> None:
        """The server waits for its handlers, and these would not end by themselves."""
        self._end_all()

    def _snapshot(self) -> bytes:
        return _event(self._engine.snapshot(NUM_STEPS))

    def _end_all(self) -> None:
        viewers, self._viewers = self._viewers, set()  # nothing comes after the end
        for sse in viewers:
            sse.end(b": the end\n\n")

    def _join(self, sse: SSEStream) -> None:
        self._viewers.add(sse)
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._run())
        startup = self._engine.startup
        sse.push(_event({"server": {name: startup.get(name) for name in _STATIC}}))
        sse.push(self._snapshot())

    def _leave(self, sse: SSEStream) -> None:
        self._viewers.discard(sse)
        if not self._viewers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                event = self._snapshot()
                for sse in self._viewers:
                    sse.push(event)
        except Exception as error:
            self._end_all()
            if not isinstance(error, EngineDeadError):  # closed: there is nothing left to see
                raise


def _event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


DASHBOARD = web.AppKey("dashboard", Dashboard)


async def dashboard_events(http: web.Request) -> web.StreamResponse:
    return await http.app[DASHBOARD].watch(http)
