"""A server for clients that block: in a thread of its own, with its own loop.

It ends with the harness's look at what was left behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import uvloop

from tests.server.http_harness import Server, serving
from tests.waiting import PATIENCE_SECONDS


@contextmanager
def in_thread(engine: Any, **args: Any) -> Iterator[Server]:
    ready: Future[tuple[Server, Callable[[], object]]] = Future()
    ended: Future[None] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serving(engine, **args) as server:
            ready.set_result((server, lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    def main() -> None:
        try:
            uvloop.run(serve())
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)
            if not ready.done():
                ready.set_exception(error)

    threading.Thread(target=main, daemon=True).start()
    server, stop = ready.result(PATIENCE_SECONDS)
    try:
        yield server
    finally:
        stop()
        ended.result(PATIENCE_SECONDS)
