"""Requests leave nothing behind that the garbage collector would have to find."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.server import serve as collector
from asyncllm.server.serve import YOUNG_OBJECTS, patient_collector
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving
from tests.server.process import MODEL
from tests.waiting import until

ENGINE = {"num_gpu_blocks_override": 400, "swap_space": 0, "max_model_len": 512, "device": "cpu"}
NUM_REQUESTS = 10  # of each kind; a cycle in each is more than this many objects
PROMPT = {"prompt": [300, 301, 302], "max_tokens": 3, "ignore_eos": True}
CHATTED = {"messages": HELLO, "max_tokens": 3}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
UNMEANT = {"type": "object", "patternProperties": {"(": {}}}
UNMEANT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": UNMEANT}}]

KINDS: dict[str, tuple[str, Any, int]] = {  # path, body, status
    "completion": (COMPLETIONS, PROMPT, 200),
    "stream": (COMPLETIONS, {**PROMPT, "stream": True}, 200),
    "text": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 3}, 200),
    "several answers": (COMPLETIONS, {**PROMPT, "n": 2, "best_of": 3}, 200),
    "stop strings": (COMPLETIONS, {**PROMPT, "n": 2, "stop": ["e", "a"], "max_tokens": 30}, 200),
    "logprobs": (COMPLETIONS, {**PROMPT, "logprobs": 2, "prompt_logprobs": 1}, 200),
    "beams": (COMPLETIONS, {**PROMPT, "n": 2, "use_beam_search": True}, 200),
    "bad words": (COMPLETIONS, {**PROMPT, "bad_words": ["a b c"]}, 200),
    "chat": (CHAT, CHATTED, 200),
    "JSON": (CHAT, {**CHATTED, "response_format": {"type": "json_object"}}, 200),
    "tools": (CHAT, {**CHATTED, "tools": TOOLS, "tool_choice": "required", "stream": True}, 200),
    "a response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "store": False}, 200),
    "a message": ("/v1/messages", {**CHATTED, "model": MODEL, "stream": True}, 200),
    "a wrong type": (COMPLETIONS, {**PROMPT, "max_tokens": "three"}, 400),
    "a wrong value": (COMPLETIONS, {**PROMPT, "temperature": -1}, 400),
    "too long": (COMPLETIONS, {**PROMPT, "prompt": [300] * 600}, 400),
    "no such model": (COMPLETIONS, {**PROMPT, "model": "none"}, 404),
    "no such route": ("/v1/none", PROMPT, 404),
    "a wrong grammar": (COMPLETIONS, {**PROMPT, "structured_outputs": {"regex": "("}}, 400),
    "an impossible schema": (COMPLETIONS, {**PROMPT, "structured_outputs": {"json": UNMEANT}}, 400),
    "impossible tools": (CHAT, {**CHATTED, "tools": UNMEANT_TOOLS, "tool_choice": "required"}, 400),
}
# Objects of a cycle in its router, without the request; Python 3.14 makes one more.
OF_AIOHTTP = {"no such route": 6 + (sys.version_info >= (3, 14))}


@pytest.fixture(autouse=True)
def collector_is_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what was here before: to walk over it each time takes long
    yield
    gc.unfreeze()
    gc.enable()
    assert gc.get_threshold() == thresholds


@pytest.mark.slow
def test_requests_leave_nothing_for_the_collector() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine(MODEL, **ENGINE)
        async with serving(engine) as server:
            for kind, (path, body, status) in KINDS.items():
                await ask(server, path, body, status, 2)  # what is made once is made
                left = await garbage_of(ask(server, path, body, status, NUM_REQUESTS), server)
                most = NUM_REQUESTS * (1 + OF_AIOHTTP.get(kind, 0))
                assert left < most, f"{kind}: {left} objects, none of them in use"
            left = await garbage_of(leave(server), server)
            assert left < NUM_REQUESTS, f"who leaves leaves {left} objects"

    run(test())


def test_requests_of_an_application_leave_nothing_for_the_collector() -> None:
    async def test() -> None:
        async with AsyncLLMEngine(MODEL, **ENGINE) as engine:
            params = SamplingParams(max_tokens=3, ignore_eos=True)

            async def ask_each_way() -> None:
                for _ in range(NUM_REQUESTS):
                    await engine.generate("Once", params)
                    async for _ in engine.generate("Once", params):
                        pass
                    async for _ in engine.generate("Once", params):
                        break
                    with pytest.raises(ValueError, match="empty"):
                        await engine.generate([], params)

            await ask_each_way()
            left = await garbage_of(ask_each_way(), None)
            assert left < NUM_REQUESTS, f"{left} objects, none of them in use"

    run(test())


async def ask(server: Server, path: str, body: Any, status: int, number: int) -> None:
    for _ in range(number):
        async with server.session.post(server.url + path, json=body) as response:
            assert response.status == status, await response.text()
            await response.read()


async def leave(server: Server) -> None:
    """By a socket of its own: what aiohttp's client leaves is not ours."""
    for stream in (True, False) * (NUM_REQUESTS // 2):
        body = json.dumps({**PROMPT, "max_tokens": 400, "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            await until(lambda: server.engine.stats().num_running > 0)
        await until(lambda: not server.engine.stats().num_running)


async def garbage_of(work: Any, server: Server | None) -> int:
    """Objects that only the collector would free, after all that `work` began has ended."""
    gc.collect()
    gc.disable()
    await work
    if server is not None:
        await until(lambda: not server.service.num_live)
    for _ in range(5):  # what has ended leaves in the loop's next turns
        await asyncio.sleep(0)
    return gc.collect()


@pytest.mark.slow
def test_it_waits_long_while_answers_are_made() -> None:
    async def test() -> None:
        before = gc.get_threshold()
        with patient_collector(serving_nobody()):
            assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
            assert len(gc.get_objects()) < 100, "all that was here before is left out"
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() == 0

    run(test())


@pytest.mark.slow
def test_it_collects_when_nobody_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(collector, "QUIET_CHECK_SECONDS", 0.001)
        service = serving_nobody()
        service.num_live = 1
        with patient_collector(service):
            first = knotted()
            await asyncio.sleep(0.02)
            assert first() is not None, "somebody is answered"
            service.num_live = 0
            await until(lambda: first() is None)
            assert gc.get_count()[0] < YOUNG_OBJECTS

    run(test())


@pytest.mark.slow
def test_many_objects_are_collected_though_somebody_is_answered() -> None:
    async def test() -> None:
        service = serving_nobody()
        service.num_live = 1
        with patient_collector(service):
            knots = [knotted() for _ in range(2 * YOUNG_OBJECTS // collector.FEW_OBJECTS)]
            num_left = sum(knot() is not None for knot in knots)
        assert num_left < len(knots)

    run(test())


class Knot:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self
        self.many: list[Any] = [[] for _ in range(collector.FEW_OBJECTS + 1)]


def knotted() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def serving_nobody() -> Any:
    return SimpleNamespace(num_live=0)
