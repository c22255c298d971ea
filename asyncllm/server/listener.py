"""The listening socket: bound before anything slow, so that a taken port fails at once.

It listens only when serving starts: until then a client is refused and not kept waiting.
"""

from __future__ import annotations

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
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            raise OSError(f"cannot use host {args.host}: {error}") from error
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
            raise OSError(f"cannot listen on {args.host}:{args.port}: {reason}") from error
        return cls(args, sock, ssl_context)

    async def start(self, runner: web.AppRunner) -> web.BaseSite:
        """Accept connections. Raises `OSError` naming the address."""
        from aiohttp import web  # a tenth of a second that --help should not cost

        site: web.BaseSite
        ssl_context = self.ssl_context
        if self.sock is None:
            assert self.args.uds is not None
            site = web.UnixSite(runner, self.args.uds, ssl_context=ssl_context, backlog=BACKLOG)
        else:
            site = web.SockSite(runner, self.sock, ssl_context=ssl_context, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cannot listen on {self.url}: {reason}") from error
        return site

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()

    @property
    def url(self) -> str:
        scheme = "https" if self.args.ssl_certfile else "http"
        if self.sock is None:
            return f"{scheme}+unix:{self.args.uds}"
        host, port = self.sock.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
