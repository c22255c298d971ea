"""Servers for clients that block: each in a thread of its own, with its own loop.

`tiny` is the real engine with the built-in model, `scripted` the fake one, which says what it is
told. Both end with the harness's look at what was left behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from asyncllm import AsyncLLMEngine
from tests.server.fake_engine import FakeEngine
from tests.server.http_harness import Server, serving
from tests.server.test_http_tools import TEMPLATE

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when it is imported
START_SECONDS = 60


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
    server, stop = ready.result(START_SECONDS)
    try:
        yield server
    finally:
        stop()
        ended.result(START_SECONDS)


@pytest.fixture(scope="session")
def tiny() -> Iterator[str]:
    """The base URL of a server with the built-in model."""
    engine = AsyncLLMEngine("tiny", max_model_len=1024, num_gpu_blocks_override=400, swap_space=0)
    with in_thread(engine) as server:
        yield f"{server.url}/v1"


class Scripted:
    def __init__(self, server: Server) -> None:
        self.url = f"{server.url}/v1"
        self.engine: FakeEngine = server.engine

    def say(self, text: str) -> None:
        self.engine.script = text


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A server whose model says what it is told, in Hermes' format."""
    engine = FakeEngine()
    engine.tokenizer.chat_template = TEMPLATE
    with in_thread(engine) as server:
        yield Scripted(server)
