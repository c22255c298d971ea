"""The page's files and its feed over HTTP, without a browser."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncllm.errors import EngineDeadError
from asyncllm.server import page as dashboard
from asyncllm.server.page import WEB
from tests.server.fake_engine import FakeEngine
from tests.server.http_harness import run, serving

FEED = "/dashboard/events"


class SeenEngine(FakeEngine):
    """Counts how often it is looked at."""

    num_snapshots = 0

    def snapshot(self, last_steps: int) -> dict[str, int]:
        self.num_snapshots += 1
        return {"number": self.num_snapshots}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PERIOD_SECONDS", 0.005)


def test_files_and_their_headers() -> None:
    async def test() -> None:
        async with serving() as server:
            for path, kind in (
                ("/", "text/html"),
                ("/docs", "text/html"),
                ("/web/main.js", "text/javascript"),
                ("/web/base.css", "text/css"),
                ("/web/icon.svg", "image/svg+xml"),
            ):
                async with server.session.get(server.url + path) as response:
                    assert response.status == 200, path
                    assert response.content_type == kind
                    policy = response.headers["Content-Security-Policy"]
                    assert policy.startswith("default-src 'none'; script-src 'self';")
                    assert "unsafe" not in policy
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
                    etag = response.headers["ETag"]
                headers = {"If-None-Match": etag}
                async with server.session.get(server.url + path, headers=headers) as response:
                    assert response.status == 304

    run(test())


@pytest.mark.parametrize(
    "path", ["/web/", "/web/nothing.js", "/web/../page.py", "/web/%2e%2e%2fpage.py", "/index.html"]
)
def test_nothing_else_is_served(path: str) -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            assert (await reader.readline()).split()[1] == b"404"
            writer.close()

    run(test())


def test_files_name_nothing_foreign() -> None:
    """No address of anybody else, no inline script or style, no HTML from text."""
    for file in (file for file in WEB.iterdir() if file.is_file()):
        text = file.read_text()
        foreign = re.findall(r"https?://[a-z0-9.]+", text)
        assert set(foreign) <= {"http://www.w3.org"}, file.name  # the name space of SVG
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, file.name
    for name in ("index.html", "docs.html"):
        html = (WEB / name).read_text()
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", html)


def test_vendored_files_are_those_of_the_manifest() -> None:
    """Unchanged since scripts/vendor_web.py fetched them, each with its licence."""
    vendor = WEB / "vendor"
    entries = json.loads((vendor / "manifest.json").read_text())
    licences = {f"LICENSE.{Path(entry['file']).stem}" for entry in entries}
    names = {entry["file"] for entry in entries} | licences | {"manifest.json"}
    assert {file.name for file in vendor.iterdir()} == names
    for entry in entries:
        content = (vendor / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], entry["file"]
        assert entry["licence"] in ("MIT", "BSD-3-Clause")
    ours = {file.name for file in WEB.iterdir()}
    assert not ours & {entry["file"] for entry in entries}  # all are served under one folder


def test_key_is_for_the_feed_not_the_files() -> None:
    async def test() -> None:
        async with serving(SeenEngine(), api_key=["secret"]) as server:
            for path in ("/", "/docs", "/openapi.json", "/web/main.js"):
                async with server.session.get(server.url + path) as response:
                    assert response.status == 200
            assert (await server.get(FEED))[0] == 401
            headers = {"Authorization": "Bearer secret"}
            async with server.session.get(server.url + FEED, headers=headers) as response:
                assert response.status == 200

    run(test())


def test_page_can_be_turned_off() -> None:
    async def test() -> None:
        async with serving(SeenEngine(), disable_page=True) as server:
            for path in ("/", "/docs", "/web/main.js", FEED):
                assert (await server.get(path))[0] == 404
        async with serving(SeenEngine(), disable_page=True, api_key=["secret"]) as server:
            assert (await server.get("/"))[0] == 401

    run(test())


async def events(response: aiohttp.ClientResponse, count: int) -> list[Any]:
    found: list[Any] = []
    async for line in response.content:
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
            if len(found) == count:
                break
    return found


async def until_unwatched(engine: SeenEngine) -> None:
    """Until ten periods pass without a snapshot."""
    taken = -1
    while taken != engine.num_snapshots:
        taken = engine.num_snapshots
        await asyncio.sleep(0.05)


def test_one_timer_for_all_viewers() -> None:
    """Each gets who the server is, one snapshot at once, then the shared ones; none is taken when
    nobody looks."""

    async def test() -> None:
        engine = SeenEngine()
        async with serving(engine) as server:
            assert engine.num_snapshots == 0
            async with (
                server.session.get(server.url + FEED) as first,
                server.session.get(server.url + FEED) as second,
            ):
                assert first.content_type == "text/event-stream"
                server_1, *_ = await events(first, 2)
                server_2, _, *shared = await events(second, 6)
                assert "server" in server_1 and "server" in server_2
                last = shared[-1]["number"]
                while (number := (await events(first, 1))[0]["number"]) < last:
                    pass  # the first has been there longer
                assert number == last
            await until_unwatched(engine)
            async with server.session.get(server.url + FEED) as again:
                assert len(await events(again, 4)) == 4

    run(test())


def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_VIEWERS", 1)

    async def test() -> None:
        async with serving(SeenEngine()) as server:
            async with server.session.get(server.url + FEED) as response:
                await events(response, 2)
                status, body = await server.get(FEED)
                assert (status, body["error"]["type"]) == (429, "rate_limit_error")
            while (await server.session.get(server.url + FEED)).status == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # the place is free soon after

    run(test())


def test_feed_ends_with_the_server() -> None:
    """Closing does not wait for viewers, who would stay for ever."""

    async def test() -> None:
        async with aiohttp.ClientSession() as session:
            async with serving(SeenEngine()) as server:
                response = await session.get(server.url + FEED)
                await events(response, 2)
            assert (await response.read()).endswith(b": the end\n\n")

    run(test())


def test_feed_of_a_closed_engine() -> None:
    """The feed ends with the engine, and a newcomer is told why."""

    async def test() -> None:
        engine = SeenEngine()
        async with serving(engine) as server, server.session.get(server.url + FEED) as response:
            await events(response, 2)

            def closed(last_steps: int) -> dict[str, int]:
                raise EngineDeadError("closed")

            engine.snapshot = closed  # type: ignore[method-assign]
            assert (await response.read()).endswith(b": the end\n\n")
            assert (await server.get(FEED))[0] == 503

    run(test())
