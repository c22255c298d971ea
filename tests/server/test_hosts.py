"""A page whose name was made to lead to a local server is refused by the Host header."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.server.http import access as hosts
from tests.server.http_harness import CHAT, HELLO, run, serving


@pytest.mark.parametrize(
    ("args", "host", "status"),
    [
        ({}, "evil.example:8000", 403),
        ({}, "evil.example", 403),
        ({}, "localhost.evil.example", 403),
        ({}, "127.0.0.1.evil.example", 403),
        ({}, "", 403),
        ({}, "localhost:1", 200),
        ({}, "LOCALHOST.", 200),
        ({}, "app.localhost", 200),
        ({}, "127.0.0.1:8000", 200),
        ({}, "192.168.0.3", 200),
        ({}, "[::1]:8000", 200),
        ({}, "[::1]", 200),
        ({"allowed_hosts": ["Box.example"]}, "box.example:80", 200),
        ({"allowed_hosts": ["box.example"]}, "evil.example", 403),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
        ({"api_key": ["k"]}, "evil.example", 200),
        ({"api_key": ["k"], "allowed_hosts": ["box.example"]}, "evil.example", 403),
        ({"host": "0.0.0.0"}, "evil.example", 200),
        ({"host": "localhost"}, "evil.example", 403),
    ],
)
def test_host(args: dict[str, Any], host: str, status: int) -> None:
    async def test() -> None:
        async with serving(**args) as server:
            headers = {"Host": host, "Authorization": "Bearer k"}
            body = {"messages": HELLO, "max_tokens": 2}
            found, answer = await server.post(CHAT, body, **headers)
            assert found == status, answer
            if status == 403:
                assert answer["error"]["code"] == "host_not_allowed"
                assert (await server.get("/health", **headers))[0] == 403
                assert not server.engine.seen

    run(test())


def test_every_loopback_address() -> None:
    assert all(map(hosts.is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(hosts.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com")))
