"""A client that goes away takes its engine request with it, wherever that request is."""

from __future__ import annotations

import asyncio
import socket
import struct

import orjson
import pytest

from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving, until


async def connect(server: Server, path: str, body: object) -> asyncio.StreamWriter:
    payload = orjson.dumps(body)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(payload), payload)
    )
    return writer


def vanish(writer: asyncio.StreamWriter, how: str) -> None:
    sock = writer.get_extra_info("socket")
    if how == "RST":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    elif how == "half-close":
        writer.write_eof()
    else:
        writer.close()


@pytest.mark.parametrize("how", ["FIN", "RST", "half-close"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "queued"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_gone_is_aborted(how: str, running: bool, stream: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            engine = server.engine
            engine.step_seconds = 0.01
            if not running:
                engine.go.clear()
            body = {"prompt": ["a", "b"], "max_tokens": 30, "stream": stream}
            writer = await connect(server, COMPLETIONS, body)
            await until(lambda: len(engine.live) == 2)
            await until(lambda: not running or engine.seen[0].num_steps >= 3)
            vanish(writer, how)
            await server.quiet()
            assert len(engine.aborted) == 2
            writer.close()

    run(test())


def test_finished_is_not_aborted() -> None:
    async def test() -> None:
        async with serving() as server:
            await server.post(CHAT, {"messages": HELLO})
            await server.events(CHAT, {"messages": HELLO})
            await server.quiet()
            assert server.engine.aborted == []

    run(test())
