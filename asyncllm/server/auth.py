"""Who may ask: a key, compared in constant time, before the body is read.

It is a bearer token, or stands in `x-api-key`, where Anthropic's clients put it.

The decision hangs on the matched route and not on the text of the path, so no spelling of a path
gets round it; what matches no route needs the key as well.
"""

from __future__ import annotations

import hmac

from aiohttp import web

from asyncllm.server.errors import ApiError, Check


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
    # Every key is compared, so time tells nothing about which one was close.
    matches = [hmac.compare_digest(key, one) for key in given for one in wanted]
    return any(matches)
