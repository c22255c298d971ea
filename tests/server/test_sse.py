"""The SSE writer: the fast way and the public way put the same bytes on the wire, and slow
readers are bounded."""

from __future__ import annotations

import asyncio
import re
import socket
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import uvloop
from aiohttp import web

from asyncllm.server.http import sse
from asyncllm.server.http.sse import (
    COALESCE_ABOVE_BYTES,
    ENDS_PER_TURN,
    MAX_PENDING_BYTES,
    STREAMS_PER_SLICE,
    FrameQueue,
    SSEStream,
)
from tests.server.fake_engine import reply
from tests.server.http_harness import CHAT, HELLO, Server, parse_events, run, serving, until

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def serve_handler(handler: object) -> tuple[web.AppRunner, int]:
    app = web.Application()
    app.router.add_get("/", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, runner.addresses[0][1]


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_installed_aiohttp_lets_frames_go_straight_to_the_transport() -> None:
    """If this fails, aiohttp has changed: adapt server/sse.py, which now takes the slow way."""

    async def test() -> None:
        seen: list[bool] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            stream = SSEStream(request)
            await stream.open()
            seen.append(stream._transport is not None)
            stream.end(b"data: a\n\n")
            await stream.run()
            return stream.response

        runner, port = await serve_handler(handler)
        await exchange(port, REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        await runner.cleanup()
        assert seen == [True]

    run(test())


@pytest.mark.parametrize("loop", [uvloop, asyncio])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_wire_equals_the_public_way(
    version: bytes, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            stream = SSEStream(request)
            stream.push(b"data: early\n\n")  # before the headers
            await stream.open()
            task = asyncio.create_task(stream.run())
            for i in range(5):
                await asyncio.sleep(0.002)
                stream.push(b"data: %d\n\n" % i)
            stream.end(b"data: a\n\ndata: b\n\n")
            await task
            return stream.response

        runner, port = await serve_handler(handler)
        request = b"GET / HTTP/" + version + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        fast = await exchange(port, request)
        monkeypatch.setattr(sse, "_writes_plain_chunks", lambda *_: False)
        public = await exchange(port, request)
        await runner.cleanup()
        body = fast.partition(b"\r\n\r\n")[2]
        # Frames that wait may be merged into one chunk; framing aside, the bytes are the same.
        assert without_chunks(body) == without_chunks(public.partition(b"\r\n\r\n")[2])
        if version == b"1.1":
            assert body.startswith(b"d\r\ndata: early\n\n\r\n")
            assert body.endswith(b"\r\n0\r\n\r\n")
        else:
            assert body.startswith(b"data: early\n\ndata: 0\n\n")

    loop.run(test())


def test_changed_aiohttp_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        monkeypatch.setattr(sse, "_has_logged", False)
        monkeypatch.setattr(sse, "StreamWriter", object)  # as if prepare returned another one
        async with serving() as server:
            for _ in range(2):
                events = await server.events(CHAT, {"messages": HELLO})
                assert events[-1] == "[DONE]"
        assert caplog.text.count("slow, public calls") == 1

    run(test())


def without_chunks(body: bytes) -> bytes:
    return re.sub(rb"(^|\r\n)[0-9a-f]+\r\n", b"", body).removesuffix(b"\r\n")


async def slow_client(server: Server, **fields: object) -> socket.socket:
    """A client that has sent its request and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", server.port))
    body = orjson.dumps({"messages": HELLO, "stream": True, **fields})
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(sock, head.encode() + body)
    return sock


def pending_bytes(server: Server) -> int:
    """The buffers of the one stream in progress, ours and the transport's."""
    (generation,) = server.service._live
    stream: SSEStream = generation.consumer._sse  # type: ignore[attr-defined]
    transport = stream._request.transport
    num_pending = sum(map(len, stream._pending))
    return num_pending + (transport.get_write_buffer_size() if transport else 0)


def test_slow_reader_is_coalesced_and_served() -> None:
    """Bytes that the sockets do not take wait here, and arrive complete and in order."""

    async def test() -> None:
        async with serving(small_buffers=True) as server:
            server.engine.chunk_text = lambda text: text * 30_000
            sock = await slow_client(server, max_tokens=25)
            loop = asyncio.get_running_loop()
            await until(lambda: server.engine.seen and not server.engine.live)
            waiting = pending_bytes(server)  # the engine is done, the client has read nothing
            received = bytearray()
            while not received.endswith(b"0\r\n\r\n"):
                received += await loop.sock_recv(sock, 1 << 20)
            sock.close()
            assert COALESCE_ABOVE_BYTES < waiting <= MAX_PENDING_BYTES
            assert server.engine.aborted == []
            events = parse_events(
                without_chunks(bytes(received).partition(b"\r\n\r\n")[2]).decode()
            )
            text = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
            whole = reply(0).encode()[:25].decode()
            assert text == "".join(char * 30_000 for char in whole)

    run(test())


def test_reader_that_never_reads_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(small_buffers=True) as server:
            server.engine.chunk_text = lambda text: text * 400_000
            sock = await slow_client(server)
            most = 0
            while not server.engine.aborted:
                if server.service.num_live:
                    most = max(most, pending_bytes(server))
                await asyncio.sleep(0.001)
            await server.quiet()
            sock.close()
            # One frame above the limit is what was refused, and is the most ever held.
            assert most <= MAX_PENDING_BYTES + 400_000 + 1000
            assert len(server.engine.aborted) == 1
            server.engine.chunk_text = lambda text: text
            assert (await server.post(CHAT, {"messages": HELLO}))[0] == 200
        assert "dropped a client" in caplog.text

    run(test())


class NotedWrites:
    """A transport that notes what it is given, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.writes: list[bytes] = []
        self._error = error

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        self.writes.append(data)


def open_stream(queue: FrameQueue, transport: Any) -> SSEStream:
    request: Any = SimpleNamespace(transport=transport, writer=SimpleNamespace())
    stream = SSEStream(request, queue)
    stream._transport = transport  # as `open` does
    return stream


def test_frames_of_one_step_are_one_write() -> None:
    async def test() -> None:
        transport = NotedWrites()
        stream = open_stream(FrameQueue(), transport)
        stream.push(b"data: a\n\n")
        stream.push(b"data: b\n\n")
        assert transport.writes == [], "the step goes on"
        await asyncio.sleep(0)
        assert transport.writes == [b"12\r\ndata: a\n\ndata: b\n\n\r\n"]
        stream.push(b"data: c\n\n")
        await asyncio.sleep(0)
        assert transport.writes[1:] == [b"9\r\ndata: c\n\n\r\n"]

    run(test())


def test_a_large_step_is_written_in_slices_in_order() -> None:
    """Others get a turn between them, and what they push is written after."""

    async def test() -> None:
        queue = FrameQueue()
        transports = [NotedWrites() for _ in range(2 * STREAMS_PER_SLICE + 1)]
        streams = [open_stream(queue, transport) for transport in transports]
        for stream in streams:
            stream.push(b"data: a\n\n")
        written = []
        for turn in range(4):
            await asyncio.sleep(0)
            written.append(sum(len(transport.writes) for transport in transports))
            if turn == 0:
                streams[0].push(b"data: b\n\n")
        assert written[0] == STREAMS_PER_SLICE, "the first slice"
        assert written[1] == 2 * STREAMS_PER_SLICE
        assert written[3] == written[2] == len(streams) + 1
        assert [len(transport.writes) for transport in transports] == [2] + [1] * (len(streams) - 1)

    run(test())


def test_no_stream_is_more_than_two_steps_behind() -> None:
    """An engine that has its next step at every turn, faster than the streams are written."""

    async def test() -> None:
        queue = FrameQueue()
        transports = [NotedWrites() for _ in range(5 * STREAMS_PER_SLICE)]
        streams = [open_stream(queue, transport) for transport in transports]
        for _ in range(20):
            for stream in streams:
                stream.push(b"data: a\n\n")
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        for transport in transports:
            steps_per_write = [data.count(b"data: a") for data in transport.writes]
            assert sum(steps_per_write) == 20 and max(steps_per_write) == 2

    run(test())


def test_a_transport_that_raises_does_not_keep_others_waiting() -> None:
    async def test() -> None:
        seen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
        queue, good = FrameQueue(), NotedWrites()
        bad = open_stream(queue, NotedWrites(RuntimeError("broken")))
        for stream in (bad, open_stream(queue, good)):
            stream.push(b"data: a\n\n")
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(good.writes) == 1
        assert "broken" in str(seen[0]["exception"])

    run(test())


def test_handlers_whose_streams_end_together_are_woken_a_few_at_a_time() -> None:
    async def test() -> None:
        queue, woken = FrameQueue(), []

        async def handle(stream: SSEStream) -> None:
            await stream._wake.wait()
            woken.append(stream)

        streams = [open_stream(queue, NotedWrites()) for _ in range(3 * ENDS_PER_TURN)]
        handlers = [asyncio.create_task(handle(stream)) for stream in streams]
        await asyncio.sleep(0)
        for stream in streams:
            stream.end(b"data: [DONE]\n\n")
        seen = [0]
        while len(woken) < len(streams):
            await asyncio.sleep(0)
            seen.append(len(woken))
        await asyncio.gather(*handlers)
        assert woken == streams
        assert max(now - before for before, now in pairwise(seen)) == ENDS_PER_TURN
        for stream in streams:
            assert stream._transport.writes == [b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]  # type: ignore[union-attr]

    run(test())


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("before", [b"", b"data: a\n\n"])
def test_an_end_without_frames_is_an_end(before: bytes, is_direct: bool) -> None:
    """Whatever was written of the frames before it, and by whom."""

    async def test() -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            stream = SSEStream(request)
            await stream.open()
            if not is_direct:
                stream._transport = None
            task = asyncio.create_task(stream.run())
            stream.push(before)
            stream.wake()
            await asyncio.sleep(0)
            stream.end(b"")
            await task
            return stream.response

        runner, port = await serve_handler(handler)
        answer = await exchange(
            port, REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        await runner.cleanup()
        assert without_chunks(answer.partition(b"\r\n\r\n")[2]) == before

    run(test())
