"""TLS and Unix sockets carry the same server."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import aiohttp
import pytest

from asyncllm.server.args import ServerArgs
from asyncllm.server.http.listener import Listener
from tests.server.http_harness import CHAT, HELLO, run, serving

STREAM = {"messages": HELLO, "stream": True}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls(tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-keyout", key, "-out", cert, "-days", "2"],
        check=True, capture_output=True,
    )  # fmt: skip

    async def test() -> None:
        async with (
            serving(ssl_certfile=cert, ssl_keyfile=key) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session,
            session.post(server.url + CHAT, json=STREAM) as response,
        ):
            assert server.url.startswith("https://")
            assert (await response.text()).endswith("data: [DONE]\n\n")

    run(test())


def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")

    async def test() -> None:
        async with (
            serving(uds=path) as server,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
            session.post(f"http://x{CHAT}", json=STREAM) as response,
        ):
            assert path in server.url
            assert (await response.text()).endswith("data: [DONE]\n\n")

    run(test())


def test_a_name_with_both_families_is_reached_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: object, **__: object) -> list[tuple[object, ...]]:
        stream = socket.SOCK_STREAM
        return [
            (socket.AF_INET6, stream, 6, "", ("::1", 0, 0, 0)),
            (socket.AF_INET, stream, 6, "", ("127.0.0.1", 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    listener = Listener.bind(ServerArgs(host="localhost", port=0))
    assert listener.url.startswith("http://127.0.0.1:")
    listener.close()
