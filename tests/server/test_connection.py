"""Below the handlers: HTTP that cannot be read, and clients that do not get on with it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from asyncllm.server.http import bodies, connection
from asyncllm.server.http import connection as arrivals
from asyncllm.server.http.connection import Arrivals, Connection
from tests.server.http_harness import CHAT, Server, run, serving
from tests.server.test_sse import slow_client
from tests.waiting import PATIENCE_SECONDS, until

GOOD_BODY = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}'
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD_BODY) + GOOD_BODY

UNREADABLE = {
    "bad method": b"G@T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "version 9": b"GET / HTTP/9.9x\r\nHost: localhost\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "long URI": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 9000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    + b"".join(b"A%d: a\r\n" % i for i in range(200))
    + b"\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: a\x00b\r\n\r\n",
    "space before the colon": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA : b\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\n",
    "signed length": HEAD + b"Content-Length: +5\r\n\r\nabcde",
    "length and chunked": HEAD
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown transfer encoding": HEAD + b"Transfer-Encoding: chunked, wat\r\n\r\n0\r\n\r\n",
    "bad chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "huge chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "chunk without its end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
}


async def exchange(server: Server, sent: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await reader.read()
    finally:
        writer.close()


def check_error(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status, answer
    assert b"application/json" in head
    assert b"aiohttp" not in head and b"Python" not in head  # no versions for who looks for holes
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == (
        "server_error" if status >= 500 else "invalid_request_error"
    )


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_http_gets_the_four_keys_and_its_connection_ends(sent: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            check_error(await exchange(server, sent), 400)
            assert (await server.get("/health"))[0] == 200
            await server.quiet()

    run(test())


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
def test_another_version_of_http_is_refused(version: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            sent = b"GET /health HTTP/%b\r\nHost: localhost\r\n\r\n" % version
            check_error(await exchange(server, sent), 505)
            await server.quiet()

    run(test())


@pytest.mark.parametrize(("num_headers", "header_bytes"), [(127, 10), (3, 8190)])
def test_headers_at_their_limits_are_taken(num_headers: int, header_bytes: int) -> None:
    """aiohttp's: 128 headers, 8190 bytes each. One above: see UNREADABLE."""

    async def test() -> None:
        async with serving() as server:
            names = [b"A%d" % i for i in range(num_headers - 1)]
            lines = [name + b": " + b"a" * (header_bytes - len(name) - 2) for name in names]
            head = b"\r\n".join(
                [b"GET /health HTTP/1.1", b"Host: localhost", *lines, b"Connection: close"]
            )
            assert (await exchange(server, head + b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(test())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        async with serving() as server:
            last = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            answer = await exchange(
                server, GOOD + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + last
            )
            statuses = [int(part.split()[0]) for part in answer.split(b"HTTP/1.1 ")[1:]]
            assert statuses == [200, 200, 404]

    run(test())


def test_an_upgrade_is_not_taken() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await exchange(
                server,
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\n"
                b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            )
            assert answer.startswith(b"HTTP/1.1 200")

    run(test())


def test_slow_headers_end_with_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)

    async def test() -> None:
        async with serving() as server:
            check_error(await exchange(server, b"GET /health HTTP/1.1\r\nHos"), 408)

    run(test())


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The server's side of all connections since."""
    found: list[Connection] = []

    class Noted(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            found.append(self)

    monkeypatch.setattr(connection, "Connection", Noted)
    return found


def test_headers_that_come_in_pieces_have_one_deadline(accepted: list[Connection]) -> None:
    """It is of one request, and ends with its headers; one timer watches them all."""

    async def test() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(2):
                writer.write(b"GET /health HT")
                await until(lambda: accepted and accepted[0]._headers_since)
                since, timer = accepted[0]._headers_since, accepted[0]._header_timer
                assert timer is not None
                writer.write(b"TP/1.1\r\nHost: ")
                await asyncio.sleep(0.01)
                assert accepted[0]._headers_since == since
                writer.write(b"localhost\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert accepted[0]._headers_since is None
                assert accepted[0]._header_timer is timer
            writer.close()
            await until(lambda: accepted[0]._header_timer is None)
            assert timer.cancelled()


def test_a_timer_of_headers_long_complete_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was set for an earlier request of the connection, and must not end a later one early."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)

    async def test() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            await asyncio.sleep(0.2)
            writer.write(b"GET /hea")
            check_error(await reader.read(), 408)
            assert time.monotonic() - began >= 0.4  # and not when the timer fired, after 0.3
            writer.close()

    run(test())


def test_a_slow_body_ends_with_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    monkeypatch.setitem(web.RequestHandler.__init__.__kwdefaults__, "lingering_time", 0.2)

    async def test() -> None:
        async with serving() as server:
            check_error(await exchange(server, GOOD[:-4]), 408)
            await server.quiet()

    run(test())


def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.2)

    async def test() -> None:
        async with serving() as server:
            assert await exchange(server, b"") == b""
            answer = await exchange(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")

    run(test())


def test_one_connection_above_the_limit_is_refused_and_room_is_given_back(
    accepted: list[Connection],
) -> None:
    async def test() -> None:
        async with serving(max_connections=2) as server:
            open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            await until(lambda: len(accepted) == 2)
            check_error(await exchange(server, b""), 503)
            open_ones[0][1].write(GOOD)
            assert (await open_ones[0][0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            for _, writer in open_ones:
                writer.close()
            await until(lambda: all(one.transport is None for one in accepted))
            assert (await server.get("/health"))[0] == 200

    run(test())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a Linux option")
def test_a_stalled_reader_is_ended_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_STALL_SECONDS", 1)

    async def test() -> None:
        async with serving(small_buffers=True) as server:
            server.engine.step_seconds = 0.005
            stalled = await slow_client(server, n=16)
            await until(lambda: server.engine.live)
            good = await server.events(
                CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
            )
            assert good[-1] == "[DONE]"
            await server.quiet()  # the stalled one is over although it never read
            stalled.close()

    run(test())


class Piecemeal(Arrivals):
    """Everything waits, until the test calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Callable[[], None]] = []

    def take(self, read: Callable[[], None]) -> bool:
        self.reads.append(read)
        return False


class Wire(asyncio.Transport):
    """A transport that notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.sent = b""

    def pause_reading(self) -> None:
        self.asked.append("pause")

    def resume_reading(self) -> None:
        self.asked.append("resume")

    def is_closing(self) -> bool:
        return "close" in self.asked

    def close(self) -> None:
        self.asked.append("close")

    def abort(self) -> None:
        self.asked.append("abort")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data


@asynccontextmanager
async def piecemeal() -> AsyncIterator[tuple[Connection, Wire, Piecemeal]]:
    """A connection to a server that answers with the body it got."""

    async def echo(request: web.BaseRequest) -> web.Response:
        return web.Response(body=await request.read())

    arrivals, wire = Piecemeal(), Wire()
    runner = web.ServerRunner(web.Server(echo))
    await runner.setup()
    assert runner.server is not None
    found = Connection(runner.server, arrivals, 1)
    found.connection_made(wire)
    yield found, wire, arrivals
    found.connection_lost(None)
    await runner.cleanup()


def test_what_comes_before_its_turn_is_held_whole_and_in_order() -> None:
    pieces = [GOOD[:50], GOOD[50:200], GOOD[200:]]

    async def test() -> None:
        async with piecemeal() as (client, wire, arrivals):
            for piece in pieces:
                client.data_received(piece)
            assert len(arrivals.reads) == 1, "one place, however many pieces"
            assert wire.asked[0] == "pause", "who has not had its turn sends no more"
            arrivals.reads[0]()
            assert wire.asked[-1] == "resume"
            await until(lambda: wire.sent.endswith(GOOD_BODY))

    run(test())


def test_what_breaks_the_parser_in_its_turn_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside its turn the loop calls, and does that itself."""

    def broken(connection: web.RequestHandler, data: bytes) -> None:
        raise RuntimeError("a bug in the parser")

    async def test() -> None:
        async with piecemeal() as (client, wire, arrivals):
            client.data_received(GOOD)
            monkeypatch.setattr(web.RequestHandler, "data_received", broken)
            with pytest.raises(RuntimeError):
                arrivals.reads[0]()
            assert wire.asked == ["abort"]

    run(test())


def test_one_piece_that_waits_pauses_nothing() -> None:
    async def test() -> None:
        async with piecemeal() as (client, wire, arrivals):
            client.data_received(GOOD)
            arrivals.reads[0]()
            await until(lambda: wire.sent.endswith(GOOD_BODY))
            assert wire.asked == []

    run(test())


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_who_leaves_before_its_turn_is_not_read(num_pieces: int) -> None:
    async def test() -> None:
        async with piecemeal() as (client, wire, arrivals):
            for _ in range(num_pieces):
                client.data_received(GOOD)
            client.connection_lost(None)
            arrivals.reads[0]()
            assert wire.sent == b"" and "resume" not in wire.asked

    run(test())


def test_a_burst_is_answered_one_request_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest slice that there is; half of the clients send their body on its own."""
    monkeypatch.setattr(arrivals, "SLICE_SECONDS", 0.0)
    split = len(GOOD) - len(GOOD_BODY)

    async def ask(server: Server, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GOOD[:split] if number % 2 else GOOD)
        if number % 2:
            await asyncio.sleep(0.01)
            writer.write(GOOD[split:])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    async def test() -> None:
        async with serving() as server:
            await asyncio.gather(*(ask(server, number) for number in range(24)))

    run(test())


def test_when_aiohttp_goes_on_with_what_it_has_no_deadline_begins() -> None:
    async def test() -> None:
        async with piecemeal() as (client, _, arrivals):
            client.data_received(b"")
            assert client._headers_since is None and arrivals.reads == []

    run(test())
