"""scripts/ on the path, and the mock server in a thread of the test process."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))


@contextmanager
def serve(**settings: Any) -> Iterator[str]:
    """The mock's address; it ends with the block."""
    from loadtesting.mock_answer import MockSettings
    from loadtesting.mock_server import MockServer

    addresses: queue.Queue[str] = queue.Queue()
    stop: list[Callable[[], object]] = []

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        server = MockServer(MockSettings(port=0, **settings))
        ready: Any = SimpleNamespace(send=addresses.put)
        try:
            await server.serve(reuse_port=False, ready=ready)
        except asyncio.CancelledError:
            return

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield addresses.get(timeout=PATIENCE_SECONDS)
    finally:
        stop[0]()
        thread.join()


@pytest.fixture
def mock() -> Iterator[Callable[..., str]]:
    """mock(tokens_per_second=...) starts one and returns its address."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serve(**settings))
