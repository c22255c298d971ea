"""GET /dashboard/events: what the engine is doing, twice a second, to everyone who looks.

One timer serves all viewers: it takes one snapshot, renders it once and pushes the same bytes to
each. It starts with the first viewer and ends with the last, and only in between does the engine
have an observer more. A viewer who reads too slowly is dropped by its `SSEStream`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.errors import EngineDeadError
from asyncllm.server.errors import ApiError
from asyncllm.server.snapshot import SnapshotTaker
from asyncllm.server.sse import SSEStream

PERIOD_SECONDS = 0.5
MAX_VIEWERS = 32


class Dashboard:
    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._viewers: set[SSEStream] = set()
        self._taker = SnapshotTaker(engine)
        self._timer: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

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

    def _end_all(self) -> None:
        for sse in self._viewers:
            sse.end(b": the end\n\n")

    def _join(self, sse: SSEStream) -> None:
        self._viewers.add(sse)
        if self._timer is None:
            self._taker.start()
            self._timer = asyncio.create_task(self._run())
        sse.push(_event(self._taker.first()))

    def _leave(self, sse: SSEStream) -> None:
        self._viewers.discard(sse)
        if not self._viewers and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._taker.stop()

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                event = _event(self._taker.next())
                for sse in self._viewers:
                    sse.push(event)
        except EngineDeadError:
            pass  # closed: there is nothing left to see
        finally:
            self._end_all()


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


DASHBOARD = web.AppKey("dashboard", Dashboard)


async def dashboard_events(http: web.Request) -> web.StreamResponse:
    return await http.app[DASHBOARD].watch(http)
