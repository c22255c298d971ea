"""The pages at `/` (a chat and a dashboard) and `/docs`, served as the files they are in `web/`.

The files hold nothing of the model or its users, so they need no API key; what they fetch
(`/v1/...`, `/dashboard/events`) does. Nothing is fetched from anywhere else, and the policy below
holds the browser to that: no foreign request, no inline script, no HTML made from text.

One timer serves all viewers of the dashboard: it takes one `engine.snapshot()`, renders it once and
pushes the same bytes to each. It starts with the first viewer and ends with the last.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.errors import EngineDeadError
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.sse import SSEStream

WEB = Path(__file__).parent / "web"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The served files, those of web/vendor among ours. A name is looked up here and never joined to a
# path.
_FILES = {file.name: file for file in WEB.rglob("*") if file.suffix in _TYPES}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time: 304 while unchanged
}


async def page_file(http: web.Request) -> web.StreamResponse:
    """GET / and GET /web/{name}."""
    return _file_response(http.match_info.get("name", "index.html"))


async def docs_page(http: web.Request) -> web.StreamResponse:
    """GET /docs."""
    return _file_response("docs.html")


def _file_response(name: str) -> web.StreamResponse:
    file = _FILES.get(name)
    if file is None:
        raise web.HTTPNotFound
    return web.FileResponse(file, headers={**_HEADERS, "Content-Type": _TYPES[file.suffix]})


PERIOD_SECONDS = 0.5
MAX_VIEWERS = 32
NUM_STEPS = 96  # as many bars as the panel has room for
_STATIC = ("architecture", "device", "dtype", "attention_backend", "max_model_len")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip


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
        sse.push(_event({"server": self._facts()}))
        sse.push(self._snapshot())

    def _facts(self) -> dict[str, Any]:
        """Facts that do not change, and the values that apply where a chat request sets none."""
        startup = self._engine.startup
        defaults = self._engine.input_processor.default_params({"max_tokens": None})
        sampling = {name: getattr(defaults, name) for name in _SAMPLING}
        return {**{name: startup.get(name) for name in _STATIC}, "sampling": sampling}

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
