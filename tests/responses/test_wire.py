"""Answers are what openapi.json says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from asyncllm.server.responses import serving as responses_serving
from tests.server.fake_engine import FakeEngine
from tests.server.http_harness import run, serving
from tests.server.scripted import NAMES, PARAMETERS, script
from tests.server.test_answers import check, check_event

RESPONSES = "/v1/responses"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
CALLED = [
    {"role": "user", "content": "Hi"},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
]


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_output_tokens": 3}, LOGPROBS, {"reasoning": {"summary": "auto"}}, {"input": CALLED}],
)
def test_answers_and_events_are_as_documented(fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving() as server:
            script(server.engine)
            body = {"input": "Hello", "tools": TOOLS, **fields}
            status, answer = await server.post(RESPONSES, body)
            assert status == 200
            check("POST", RESPONSES, 200, answer)
            path = f"{RESPONSES}/{answer['id']}"
            for event in await server.named_events(RESPONSES, body):
                check_event(RESPONSES, event)
            status, shown = await server.get(path)
            check("GET", f"{RESPONSES}/{{response_id}}", status, shown)
            assert shown == answer
            status, items = await server.get(f"{path}/input_items")
            check("GET", f"{RESPONSES}/{{response_id}}/input_items", status, items)
            async with server.session.delete(server.url + path) as response:
                body = await response.json()
            check("DELETE", f"{RESPONSES}/{{response_id}}", 200, body)
            status, gone = await server.get(path)
            check("GET", f"{RESPONSES}/{{response_id}}", 404, gone)

    run(test())


def test_a_failed_stream_is_as_documented() -> None:
    async def test() -> None:
        async with serving() as server:
            events = await server.named_events(RESPONSES, {"input": "<fail>"})
            assert events[-1]["type"] == "response.failed"
            for event in events:
                check_event(RESPONSES, event)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_input_items_are_rendered_before_the_engine_has_the_request(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be as large as a body, and a stream ends inside a step of the engine."""
    engine = FakeEngine()
    asked_by_then: list[int] = []

    def dumps(value: Any) -> bytes:
        if isinstance(value, list):
            asked_by_then.append(len(engine.seen))
        return orjson.dumps(value)

    monkeypatch.setattr(responses_serving, "orjson", SimpleNamespace(dumps=dumps))

    async def test() -> None:
        async with serving(engine) as server:
            if stream:
                await server.named_events(RESPONSES, {"input": "Hello"})
            else:
                await server.post(RESPONSES, {"input": "Hello"})
        assert asked_by_then == [0]

    run(test())
