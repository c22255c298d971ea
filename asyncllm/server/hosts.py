"""By which names a server may be asked: against pages whose own name was made to lead here.

A page in somebody's browser may have its name resolve to 127.0.0.1 after it was loaded (DNS
rebinding): the browser then takes this server for the page's own. The Host header still says that
name, and a page cannot change it. So a server on loopback that asks for no key answers only to
addresses, which no page can have resolve to others, to localhost, and to names that it was told.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from aiohttp import web

from asyncllm.server.args import ServerArgs
from asyncllm.server.errors import ApiError, Check

ANY = "*"


def are_hosts_checked(args: ServerArgs) -> bool:
    is_open_to_pages = args.uds is None and is_loopback(args.host) and not args.keys()
    return is_open_to_pages or args.allowed_hosts is not None


def host_check(args: ServerArgs) -> Check:
    allowed = frozenset(name.lower() for name in args.allowed_hosts or ())

    def check(request: web.Request) -> None:
        host = request.headers.get("Host")  # every browser sends one
        if host is not None and not is_allowed(host, allowed):
            shown = f"{host:.100}"
            message = f"the host {shown!r} is not served here: start with --allowed-hosts"
            raise ApiError(403, message, code="host_not_allowed")

    return check


@lru_cache(maxsize=64)  # a client names one
def is_allowed(host: str, allowed: frozenset[str]) -> bool:
    """`host`: the header, with or without a port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.lower().removesuffix(".")
    if ANY in allowed or name in allowed or name == "localhost" or name.endswith(".localhost"):
        return True
    return _address(name.removeprefix("[").removesuffix("]")) is not None


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
