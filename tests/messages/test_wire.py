"""Answers are what openapi.json says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.http_harness import HELLO, run, serving
from tests.server.scripted import NAMES, PARAMETERS, script
from tests.server.test_answers import check, check_event

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
GOOD: dict[str, Any] = {"max_tokens": 500, "messages": HELLO, "tools": TOOLS}
PLAIN: dict[str, Any] = {"max_tokens": 100, "messages": HELLO}


def test_answers_and_events_are_as_documented() -> None:
    async def test() -> None:
        async with serving() as server:
            script(server.engine)
            for body in (GOOD, {**GOOD, "max_tokens": 3}):
                status, answer = await server.post(MESSAGES, body)
                assert status == 200
                check("POST", MESSAGES, 200, answer)
                events = await server.named_events(MESSAGES, body)
                assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
                for event in events:
                    check_event(MESSAGES, event)
            status, answer = await server.post(MESSAGES, {**GOOD, "max_tokens": 0})
            check("POST", MESSAGES, 400, answer)
            _, answer = await server.post(COUNT, GOOD)
            check("POST", COUNT, 200, answer)
            failing = {**PLAIN, "system": "<fail>"}
            for event in await server.named_events(MESSAGES, failing):
                check_event(MESSAGES, event)

    run(test())


def test_a_call_that_is_cut_off_has_no_arguments() -> None:
    async def test() -> None:
        async with serving() as server:
            script(server.engine, '<tool_call>\n{"name": "time", "arguments": {"a": 1')
            _, answer = await server.post(MESSAGES, GOOD)
            assert answer["content"][0]["input"] == {}

    run(test())


@pytest.mark.parametrize("blank", ["\n", " \n\n "])
def test_an_answer_of_white_space_alone_is_kept(blank: str) -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.script = blank
            _, answer = await server.post(MESSAGES, PLAIN)
            assert [block["text"] for block in answer["content"]] == [blank]
            kinds = [event["type"] for event in await server.named_events(MESSAGES, PLAIN)]
            assert kinds[2:5] == [
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
            ]

    run(test())


def test_one_write_per_step_and_few_bytes_around_the_text() -> None:
    async def test() -> None:
        async with serving() as server:
            events = await server.named_events(MESSAGES, PLAIN)
            deltas = [event for event in events if event["type"] == "content_block_delta"]
            text = "".join(delta["delta"]["text"] for delta in deltas)
            assert len(deltas) == len(text)  # the fake engine's step: a character

    run(test())


def test_a_stream_s_first_and_last_usage_agree() -> None:
    async def test() -> None:
        async with serving(enable_prompt_tokens_details=False) as server:
            script(server.engine)
            events = await server.named_events(MESSAGES, PLAIN)
        first = events[0]["message"]["usage"]
        last = next(event for event in events if event["type"] == "message_delta")["usage"]
        for key in ("input_tokens", "cache_read_input_tokens"):
            assert first[key] == last[key]
        assert first["cache_read_input_tokens"] == 0

    run(test())
