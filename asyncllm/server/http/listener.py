"""The listening socket: made before anything slow, so that a taken port fails at once.

It listens from the beginning: of two servers that start at once on one port only one may, and the
other says so before it loads a model. A client that comes before there is a server to answer, if
only that the model loads, waits for the seconds until then.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncllm.server.args import ServerArgs

if TYPE_CHECKING:
    from aiohttp import web

BACKLOG = 2048


@dataclass(slots=True)
class Listener:
    args: ServerArgs
    sock: socket.socket | None  # None with a Unix socket, which is made when serving starts
    ssl_context: ssl.SSLContext | None
    _server: asyncio.AbstractServer | None = None

    @classmethod
    def bind(cls, args: ServerArgs) -> Listener:
        """Raises `OSError` naming the address, `ValueError` naming the certificate."""
        ssl_context = args.ssl_context()
        if args.uds is not None:
            return cls(args, None, ssl_context)
        try:
            found = socket.getaddrinfo(
                args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            # localhost may be ::1 first, where clients of 127.0.0.1 would find nobody.
            first = min(found, key=lambda each: each[0] != socket.AF_INET)
            family, kind, protocol, _, address = first
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            raise OSError(f"cannot use host {args.host}: {error}") from error
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(BACKLOG)  # two sockets may be bound to a port, one may listen
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
            raise OSError(f"cannot listen on {args.host}:{args.port}: {reason}") from error
        return cls(args, sock, ssl_context)

    async def start(self, runner: web.AppRunner) -> None:
        """Accept connections for a runner that is set up. Raises `OSError` naming the address."""
        from asyncllm.server.http.connection import accept  # aiohttp: what --help should not cost

        assert runner.server is not None
        connect = accept(runner.server, self.args.max_connections)
        loop = asyncio.get_running_loop()
        try:
            if self.sock is not None:
                self._server = await loop.create_server(
                    connect, sock=self.sock, ssl=self.ssl_context, backlog=BACKLOG
                )
            else:
                self._server = await loop.create_unix_server(
                    connect, self.args.uds, ssl=self.ssl_context, backlog=BACKLOG
                )
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cannot listen on {self.url}: {reason}") from error

    def close(self) -> None:
        """Accept no more. Connections that are open stay so."""
        if self._server is not None:
            self._server.close()
        if self.sock is not None:
            self.sock.close()

    @property
    def url(self) -> str:
        scheme = "https" if self.args.ssl_certfile else "http"
        if self.sock is None:
            return f"{scheme}+unix:{self.args.uds}"
        host, port = self.sock.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
