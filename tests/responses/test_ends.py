"""How answers of /v1/responses and /v1/messages end when they do not end well."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncllm.server.http.errors import ApiError
from tests.server.fake_engine import reply
from tests.server.http_harness import HELLO, run, serving, until
from tests.server.test_http_disconnect import connect, vanish

BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"max_tokens": 100, "messages": HELLO},
}

DELTAS = ("response.output_text.delta", "content_block_delta")


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "queued"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", BODIES)
def test_gone_is_aborted(path: str, stream: bool, running: bool, how: str) -> None:
    async def test() -> None:
        async with serving() as server:
            engine = server.engine
            engine.step_seconds = 0.01
            if not running:
                engine.go.clear()
            writer = await connect(server, path, {**BODIES[path], "stream": stream})
            await until(lambda: len(engine.live) == 1)
            await until(lambda: not running or engine.seen[0].num_steps >= 3)
            vanish(writer, how)
            await server.quiet()
            assert len(engine.aborted) == 1
            writer.close()

    run(test())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", BODIES)
def test_a_server_that_goes_says_so(path: str, stream: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.step_seconds = 0.01
            body = {**BODIES[path], "stream": stream}
            call = asyncio.create_task(server.session.post(server.url + path, json=body))
            await until(lambda: server.engine.seen and server.engine.seen[0].num_steps >= 3)
            server.service.fail_live(ApiError(503, "the server is shutting down"))
            async with await call as response:
                text = await response.text()
            assert response.status == (200 if stream else 503)
            last = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))
            if stream and path == "/v1/responses":
                assert last["type"] == "response.failed"
                assert last["response"]["error"]["code"] == "server_error"
            elif path == "/v1/messages":
                assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
            else:
                assert last["error"]["code"] == "service_unavailable"
            assert "shutting down" in text

    run(test())


@pytest.mark.parametrize("path", BODIES)
def test_a_queue_that_is_full(path: str) -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.max_queued = 0
            for stream in (True, False):
                body = {**BODIES[path], "stream": stream}
                async with server.session.post(server.url + path, json=body) as response:
                    assert response.status == 429
                    assert response.headers["Retry-After"]
                    assert (await response.json())["error"]["type"] == "rate_limit_error"

    run(test())


@pytest.mark.parametrize("path", BODIES)
def test_many_streams_at_once(path: str) -> None:
    async def test() -> None:
        async with serving() as server:
            limit = "max_tokens" if path == "/v1/messages" else "max_output_tokens"

            async def one(number: int) -> None:
                body = {**BODIES[path], limit: number + 1}
                events = await server.named_events(path, body)
                told = [event["delta"] for event in events if event["type"] in DELTAS]
                text = "".join(d if isinstance(d, str) else d["text"] for d in told)
                assert text == reply(0).encode()[: number + 1].decode("utf-8", "ignore")

            await asyncio.gather(*(one(number) for number in range(32)))

    run(test())
