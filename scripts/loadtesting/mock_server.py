"""A server without a model: what the client can take, and what it makes of bad answers.

All streams step on one grid, in bursts as an engine's do; one task writes the frames of all of
them, straight to the transports. Its capacity is known: max_running streams of tokens_per_second
each; who does not fit waits. It can be told to fail, refuse, stall, hold back text, and to send
several tokens in a chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import orjson
from aiohttp import web

from loadtesting import mock_answer
from loadtesting.mock_answer import MockSettings
from loadtesting.record import now
from loadtesting.worker import loop_factory

ON_PURPOSE = {"error": {"message": "the mock fails on purpose", "type": "mock"}}


class Stepper:
    """Writes one frame to each running stream, then waits for the next point of the grid."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.streams: dict[asyncio.Future[None], tuple[asyncio.Transport, Iterator[bytes]]] = {}
        self.task: asyncio.Task[None] | None = None

    async def stream(self, transport: asyncio.Transport, frames: Iterator[bytes]) -> None:
        """Returns when all frames are written or the client is gone."""
        done = asyncio.get_running_loop().create_future()
        self.streams[done] = (transport, frames)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.run())
        await done

    async def run(self) -> None:
        due_s = now() // self.step_s * self.step_s if self.step_s else now()
        while self.streams:
            due_s = max(due_s + self.step_s, now() - self.step_s)  # a stall is not made up for
            await asyncio.sleep(max(0.0, due_s - now()))
            for done, (transport, frames) in list(self.streams.items()):
                frame = None if transport.is_closing() else next(frames, None)
                if frame is not None:
                    transport.write(frame)
                else:
                    del self.streams[done]
                    done.set_result(None)


class MockServer:
    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.stepper = Stepper(settings.tokens_per_chunk / settings.tokens_per_second)
        self.room = asyncio.Semaphore(settings.max_running)
        self.num_requests = self.num_tokens = self.num_cancelled = 0
        self.queue_s = 0.0

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        lines = [
            f'mock:generation_tokens_total{{model="mock"}} {self.num_tokens}',
            f"mock:requests_cancelled_total {self.num_cancelled}",
            f"mock:request_queue_time_seconds_sum {self.queue_s}",
            f"mock:request_queue_time_seconds_count {self.num_requests}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.num_requests += 1
        if self.num_requests == self.settings.stall_after:
            time.sleep(self.settings.stall_s)  # noqa: ASYNC251 (everything stands still)
        if self.settings.refuse and self.settings.refuse in body:
            message = f"{self.settings.refuse} is not supported"
            return web.json_response({"error": {"message": message}}, status=400)
        failing = self.num_requests % self.settings.fail_every == 0
        failure = self.settings.fail_with if failing else None
        if failure == "500":
            return web.json_response(ON_PURPOSE, status=500)
        arrived_s = now()
        async with self.room:
            self.queue_s += now() - arrived_s
            return await self.answer(request, body, failure)

    async def answer(
        self, request: web.Request, body: dict[str, Any], failure: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        answer = mock_answer.make_answer(self.settings, body, short=failure == "short")
        # aiohttp sends the headers with the first write; only after it may frames go past it.
        await response.write(answer.head)
        if failure == "event":
            await response.write(mock_answer.sse(ON_PURPOSE))
            return response
        assert request.transport is not None
        await self.stepper.stream(request.transport, answer.frames)
        if request.transport is None or request.transport.is_closing():
            self.num_cancelled += 1
            raise ConnectionResetError
        self.num_tokens += answer.num_tokens
        if failure != "cut":
            await response.write(answer.tail)
        return response

    async def serve(self, reuse_port: bool, ready: Connection | None = None) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(
            runner, self.settings.host, self.settings.port, backlog=4096, reuse_port=reuse_port
        )
        await site.start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        if ready is None:
            print(f"mock server on {url}", flush=True)
        else:
            ready.send(url)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def serve_in_this_process(
    settings: MockSettings, reuse_port: bool = False, ready: Connection | None = None
) -> None:
    async def serve() -> None:
        await MockServer(settings).serve(reuse_port, ready)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve())


@contextmanager
def mock_processes(settings: MockSettings) -> Iterator[str]:
    """As many processes as asked for, all accepting on one port; the kernel deals connections."""
    context = get_context("spawn")
    with ExitStack() as stack:
        url = ""
        for _ in range(settings.mock_processes):
            here, there = context.Pipe()
            process = context.Process(
                target=serve_in_this_process, args=(settings, True, there), daemon=True
            )
            process.start()
            there.close()  # so that `recv` fails if the process ends before it listens
            stack.callback(process.join)
            stack.callback(process.terminate)
            url = here.recv()
            settings = replace(settings, port=int(url.rsplit(":", 1)[1]))
        yield url


def serve_mock(settings: MockSettings) -> None:
    """Until interrupted."""
    if settings.mock_processes == 1:
        serve_in_this_process(settings)
    with mock_processes(settings) as url:
        print(f"mock server on {url}", flush=True)
        while True:
            time.sleep(3600)
