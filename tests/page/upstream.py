"""A server with our page and a chat route whose every event a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from asyncllm.server.page import page_file

SERVER = {
    "architecture": "Scripted",
    "sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": None},
}


class Upstream:
    """Answers are sent event by event; a `None` among them waits for `go`."""

    def __init__(self) -> None:
        self.url = ""
        self.events: list[dict[str, Any] | None] = []
        self.go = asyncio.Event()
        self.requests: list[dict[str, Any]] = []
        self.prompt_tokens = 7
        self.refusal = ""  # the next request's, once
        self.disconnected = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def will_say(self, *texts: str | None, **ending: Any) -> None:
        deltas = [None if text is None else {"content": text} for text in texts]
        self.will_send(*deltas, **ending)

    def will_send(self, *deltas: dict[str, Any] | None, finish: str = "stop") -> None:
        self.go.clear()
        self.events = [None if delta is None else chunk(delta) for delta in deltas]
        self.events.append(chunk({}, finish_reason=finish))

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 2048}]})

    async def chat(self, http: web.Request) -> web.StreamResponse:
        self.requests.append(await http.json())
        if self.refusal:
            message, self.refusal = self.refusal, ""
            return web.json_response({"error": {"message": message}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        self._transport = http.transport
        num_tokens = 0
        try:
            for event in self.events:
                if event is None:
                    await self.go.wait()
                    continue
                num_tokens += 1
                usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": num_tokens}
                await self.send(response, json.dumps({"usage": usage, **event}))
            await self.send(response, "[DONE]")
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        return response

    async def dashboard(self, http: web.Request) -> web.StreamResponse:
        """Who the server is, and then nothing."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await self.send(response, json.dumps({"server": SERVER}))
        await asyncio.Event().wait()
        return response

    async def cut(self) -> None:
        """Breaks the connection of the answer in progress."""
        assert self._transport is not None
        self._transport.abort()

    async def send(self, response: web.StreamResponse, data: str) -> None:
        await response.write(f"data: {data}\n\n".encode())


def chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    scripted = Upstream()
    app = web.Application()
    app.add_routes(
        [
            web.get("/", page_file),
            web.get("/web/{name}", page_file),
            web.get("/v1/models", scripted.models),
            web.get("/dashboard/events", scripted.dashboard),
            web.post("/v1/chat/completions", scripted.chat),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield scripted
    finally:
        await runner.cleanup()
