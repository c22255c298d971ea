"""The cost of a request before the engine has it, counted in function calls and in functions.

Its code has mostly left the caches since the request before, so each function that is asked costs
about a microsecond, called once or ten times; both have a ceiling. Ours alone are counted, from the
sight of the bytes to the scheduler's queue: what aiohttp adds is not in our hands.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import asyncllm
from asyncllm import AsyncLLMEngine
from asyncllm.server.http.connection import Connection
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving
from tests.waiting import until

OURS = str(Path(asyncllm.__file__).parent)
OPTIONS: dict[str, Any] = {"stream": True, "temperature": 0.5, "max_tokens": 2, "top_p": 0.9}
# body -> (most calls, most functions): what they are, and a few more
BODIES: dict[str, tuple[dict[str, Any], int, int]] = {
    COMPLETIONS: ({"prompt": list(range(300, 428))}, 79, 74),
    CHAT: ({"messages": HELLO}, 141, 126),
}


class Counted:
    """Calls of our functions between the two ends of the way, of one request after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: AsyncLLMEngine) -> None:
        self.calls: list[Counter[CodeType]] = []
        scheduler = engine._running().live.scheduler
        receive, add = Connection.data_received, scheduler.add

        def receiving(connection: Connection, data: bytes) -> None:
            if data.startswith(b"POST"):
                self.calls.append(Counter())
                sys.setprofile(self._see)
            receive(connection, data)

        def adding(request: Any) -> None:
            sys.setprofile(None)
            add(request)

        monkeypatch.setattr(Connection, "data_received", receiving)
        monkeypatch.setattr(scheduler, "add", adding)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.calls[-1][frame.f_code] += 1


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_the_way_in_has_a_ceiling(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, most_calls, most_functions = BODIES[path]

    async def ask(server: Server) -> None:
        async with server.session.post(
            server.url + path,
            data=json.dumps(body | OPTIONS),
            headers={"Content-Type": "application/json"},
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    async def test() -> None:
        async with (
            AsyncLLMEngine("tiny", max_model_len=512, kv_cache_memory_bytes=2**23) as engine,
            serving(engine) as server,
        ):
            counted = Counted(monkeypatch, engine)
            for _ in range(5):
                await ask(server)
                await until(lambda: not server.service.num_live)  # or one's end falls into the next
            # What the first ones made is known; some arrive late in a turn of the loop.
            calls = min(counted.calls[2:], key=Counter.total)
            assert calls.total() <= most_calls, calls.total()
            assert len(calls) <= most_functions, len(calls)

    run(test())
