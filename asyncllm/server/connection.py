"""One client's connection: aiohttp's own, with the deadlines and the error body that it lacks.

    accepted .. first byte      IDLE_SECONDS, and so between two requests (aiohttp's keep-alive)
    first byte .. last header   HEADER_SECONDS
    last header .. last byte    bodies.BODY_SECONDS
    answer not taken            WRITE_STALL_SECONDS: the kernel ends a connection that acknowledges
                                nothing for so long, be the client stalled or gone

HTTP that the parser cannot read gets the same four keys as every other error. Made by `accept`,
a connection factory for `loop.create_server`; all that it overrides of aiohttp is public.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.server.errors import ApiError, as_api_error, bad_request

logger = logging.getLogger(__name__)

IDLE_SECONDS = 75.0
HEADER_SECONDS = 20.0
WRITE_STALL_SECONDS = 30.0


class Connection(web.RequestHandler):
    __slots__ = ("_header_deadline", "_in_request", "_is_paused", "_max_connections", "_server")

    def __init__(self, server: web.Server, max_connections: int) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_SECONDS, access_log=None)  # type: ignore[arg-type]
        self._server = server
        self._max_connections = max_connections
        self._in_request = False
        self._is_paused = False  # by a body that is read more slowly than it comes
        self._header_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _limit_write_stalls(transport)
        if len(self._server.connections) > self._max_connections:
            self._refuse(ApiError(503, f"the limit of {self._max_connections} connections is met"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_request and self._header_deadline is None:
            self._header_deadline = asyncio.get_running_loop().call_later(
                HEADER_SECONDS, self._headers_late
            )
        super().data_received(data)

    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        """aiohttp asks for it at each read of a body, and would parse nothing anew each time."""
        if self._is_paused:
            self._is_paused = False
            super().resume_reading(*args, **kwargs)

    def request_began(self) -> None:
        self._in_request = True
        self._disarm()

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
        self._disarm()
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun: it can only be cut off")
        if status < 500:
            logger.debug("unreadable HTTP", exc_info=exc)
            error = bad_request("the request is not valid HTTP")
        else:
            error = as_api_error(exc or RuntimeError(message))
        error.close = True
        return error.response()

    def _disarm(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _headers_late(self) -> None:
        self._header_deadline = None
        self._refuse(ApiError(408, f"the request's headers took over {HEADER_SECONDS:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Answer by hand, since there is no request to answer, and close."""
        if self.transport is not None:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            cast(asyncio.Transport, self.transport).write(head.encode() + body)
        self.force_close()


def accept(server: web.Server, max_connections: int) -> Callable[[], Connection]:
    """What `loop.create_server` calls for each client. `server`: the runner's, once set up."""
    return lambda: Connection(server, max_connections)


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection that its headers are complete, and when the next may come."""
    connection: Any = request.protocol
    if not isinstance(connection, Connection):  # an application runs our app in a server of its own
        return await handler(request)
    connection.request_began()
    try:
        return await handler(request)
    finally:
        connection.request_ended()


def _limit_write_stalls(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, int(WRITE_STALL_SECONDS * 1000))
