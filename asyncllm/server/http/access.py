"""Access control: API keys and Host headers, checked before the body is read.

A key is a bearer token, or stands in `x-api-key`, where Anthropic's clients put it; it is compared
in constant time. The decision hangs on the matched route and not on the text of the path, so no
spelling of a path gets round it; what matches no route needs the key as well.

A page in somebody's browser may have its name resolve to 127.0.0.1 after it was loaded (DNS
rebinding): the browser then takes this server for the page's own. The Host header still says that
name, and a page cannot change it. So a server on loopback without keys serves only addresses, which
no page can have resolve to others, localhost, and the names in --allowed-hosts.
"""

from __future__ import annotations

import hmac
import ipaddress
from functools import lru_cache

from aiohttp import web

from asyncllm.server.args import ServerArgs
from asyncllm.server.http.errors import ApiError, Check


def key_check(keys: list[str], public: frozenset[str]) -> Check:
    """`public`: the paths of routes that need no key."""
    wanted = [key.encode() for key in keys]

    def check(request: web.Request) -> None:
        if not _is_public(request, public) and not _knows_key(request, wanted):
            raise ApiError(401, "no valid API key was given", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip

    return check


def _is_public(request: web.Request, public: frozenset[str]) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical in public


def given_keys(request: web.Request) -> tuple[str, str]:
    """The bearer token and `x-api-key`, "" where there is none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    return token.strip() if is_bearer else "", request.headers.get("x-api-key", "").strip()


def _knows_key(request: web.Request, wanted: list[bytes]) -> bool:
    given = [key.encode("utf-8", "surrogateescape") for key in given_keys(request)]
    # Every key is compared, so timing reveals nothing about which one was close.
    matches = [hmac.compare_digest(key, one) for key in given for one in wanted]
    return any(matches)


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
