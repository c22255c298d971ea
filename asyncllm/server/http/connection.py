"""One client's connection: aiohttp's own, with the deadlines and the error body that it lacks.

    accepted .. first byte      IDLE_SECONDS, and so between two requests (aiohttp's keep-alive)
    first byte .. last header   HEADER_SECONDS
    last header .. last byte    bodies.BODY_SECONDS
    response not taken          WRITE_STALL_SECONDS: the kernel ends a connection that acknowledges
                                nothing for so long, be the client stalled or gone

Received bytes wait for their turn in `Arrivals`, and so does the request that they make. HTTP that
the parser cannot read gets the same four keys as every other error. Made by `accept`, a connection
factory for `loop.create_server`; all that it overrides of aiohttp is public.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.server.http.errors import ApiError, as_api_error, bad_request

logger = logging.getLogger(__name__)

IDLE_SECONDS = 75.0
HEADER_SECONDS = 20.0
WRITE_STALL_SECONDS = 30.0


class Connection(web.RequestHandler):
    __slots__ = (
        "_header_timer",
        "_headers_since",
        "_held",
        "_in_request",
        "_is_paused",
        "_max_connections",
        "_server",
        "arrivals",
    )

    def __init__(self, server: web.Server, arrivals: Arrivals, max_connections: int) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_SECONDS, access_log=None)  # type: ignore[arg-type]
        self._server = server
        self.arrivals = arrivals
        self._held: list[bytes] = []  # what has come and waits for its turn
        self._max_connections = max_connections
        self._in_request = False
        self._is_paused = False  # by a body that is read more slowly than it comes
        self._headers_since: float | None = None  # the first byte of what is no request yet
        self._header_timer: asyncio.TimerHandle | None = None  # outlives what it was set for

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _limit_write_stalls(transport)
        if len(self._server.connections) > self._max_connections:
            self._refuse(ApiError(503, f"the limit of {self._max_connections} connections is met"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._held.clear()
        self._headers_since = None
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not data:  # aiohttp itself, which goes on with what it has
            super().data_received(data)
            return
        if not self._in_request and self._headers_since is None:
            self._headers_since = asyncio.get_running_loop().time()
            if self._header_timer is None:
                self._watch_headers(HEADER_SECONDS)
        if self._held:  # a client that sends on while it waits: that is enough for now
            self._held.append(data)
            if not self._is_closing():
                self._transport().pause_reading()
        elif self.arrivals.take(self._read_held):
            super().data_received(data)
        else:
            self._held.append(data)

    def _read_held(self) -> None:
        held, self._held = self._held, []
        if self._is_closing():
            return
        if len(held) > 1:
            self._transport().resume_reading()
        try:
            super().data_received(b"".join(held))
        except Exception:
            self._transport().abort()  # as the loop does where it is the caller
            raise

    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp calls it at each read of a body, and would parse nothing anew each time."""
        if self._is_paused:
            self._is_paused = False
            super().resume_reading(*args, **kwargs)

    def request_began(self) -> None:
        self._in_request = True
        self._headers_since = None

    def request_ended(self) -> None:
        self._in_request = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """For what never reached a handler (unreadable HTTP), or escaped every middleware."""
        self._headers_since = None
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun: it can only be cut off")
        if status < 500:
            logger.debug("unreadable HTTP", exc_info=exc)
            error = bad_request("the request is not valid HTTP")
        else:
            error = as_api_error(exc or RuntimeError(message))
        error.close = True
        response = error.response()
        response.headers["Server"] = "asyncllm"  # what never reached the application: see app.py
        return response

    def _watch_headers(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(seconds, self._check_headers)

    def _check_headers(self) -> None:
        """One timer for many requests: it looks whether one of them is late."""
        self._header_timer = None
        if self._headers_since is None:
            return
        now = asyncio.get_running_loop().time()
        left = self._headers_since + HEADER_SECONDS - now
        if left > 0:
            self._watch_headers(left)
        else:
            self._refuse(ApiError(408, f"the request's headers took over {HEADER_SECONDS:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Write an error by hand, since there is no request to respond to, and close."""
        if self.transport is not None:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self._transport().write(head.encode() + body)
        self.force_close()

    def _is_closing(self) -> bool:
        return self.transport is None or self._transport().is_closing()

    def _transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self.transport)


def accept(server: web.Server, max_connections: int) -> Callable[[], Connection]:
    """Return the protocol factory for `loop.create_server`. `server`: the runner's, once set up."""
    arrivals = Arrivals()
    return lambda: Connection(server, arrivals, max_connections)


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection that its headers are complete, and when the next may come."""
    connection: Any = request.protocol
    if not isinstance(connection, Connection):  # an application runs our app in a server of its own
        return await handler(request)
    connection.request_began()
    try:
        await connection.arrivals.turn()
        return await handler(request)
    finally:
        connection.request_ended()


def _limit_write_stalls(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, int(WRITE_STALL_SECONDS * 1000))


SLICE_SECONDS = 0.001
WOKEN_PER_TURN = 8  # requests; those without time left wait again


class Arrivals:
    """Bounds how long one turn of the event loop reads from clients: SLICE_SECONDS.

    A turn runs whatever is ready, so 256 requests that come together would all be parsed, checked
    and queued in one, while the engine, whose step ends meanwhile, waits for its end. Here what
    does not fit into a slice waits: the engine waits for a slice or so, and the first of a burst
    are launched while the others are read. Two things wait, each in order of arrival: bytes, before
    they are parsed (at most one `read` for each connection), and requests, before their handlers
    begin; those come first, but behind what the handlers before them have woken: an engine that was
    idle plans two turns after the first of a burst. It knows neither HTTP nor the engine.
    """

    def __init__(self) -> None:
        self._reads: deque[Callable[[], None]] = deque()
        self._requests: dict[int, asyncio.Future[None]] = {}  # by their place in the queue
        self._places = itertools.count()
        self._slice_end: float | None = None  # of this turn; None: nothing has come in it
        self._is_scheduled = False

    def take(self, read: Callable[[], None]) -> bool:
        """Return whether the caller may read now. If not, `read` is called in its turn."""
        if not self._reads and not self._requests and self._has_time():
            return True
        self._reads.append(read)
        return False

    async def turn(self) -> None:
        """Return when it is this request's turn."""
        if not self._requests and self._has_time():
            return
        place, loop = next(self._places), asyncio.get_running_loop()
        while True:
            future = self._requests[place] = loop.create_future()
            self._schedule()
            try:
                await future
            finally:
                self._requests.pop(place, None)
            if self._has_time():
                return

    def _has_time(self) -> bool:
        """Whether this turn has time left; the first caller always has, however long it takes."""
        now = time.monotonic()
        if self._slice_end is None:
            self._slice_end = now + SLICE_SECONDS
            self._schedule()
            return True
        return now < self._slice_end

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_scheduled, self._slice_end = False, None
        if self._requests:
            asyncio.get_running_loop().call_soon(self._wake)  # behind who is ready already
            return
        while self._reads and self._has_time():
            self._reads.popleft()()
        if self._reads:
            self._schedule()

    def _wake(self) -> None:
        for place in heapq.nsmallest(WOKEN_PER_TURN, self._requests):
            future = self._requests.pop(place)
            if not future.done():  # cancelled
                future.set_result(None)
        if self._reads or self._requests:
            self._schedule()
