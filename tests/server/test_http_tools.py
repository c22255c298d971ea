"""Chats whose answers hold reasoning and tool calls, in the shapes of OpenAI and vLLM.

The fake engine writes Hermes' format a byte at a time; its tokenizer says so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.server.http_harness import CHAT, HELLO, Server, run, serving

TEMPLATE = "<think></think><tool_call>"  # what detection looks for
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm, grün?\n</think>\n\n"
ARGUMENTS = ['{"city": "Köln"}', "{}"]


@asynccontextmanager
async def saying(script: str, **args: Any) -> AsyncIterator[Server]:
    async with serving(**args) as server:
        server.engine.tokenizer.chat_template = TEMPLATE
        server.service.reasons_by_default = True  # the fake template writes each argument out
        server.engine.script = script
        yield server


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


async def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await server.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice


def added_up(events: list[Any]) -> dict[str, Any]:
    """The deltas of the only choice, as clients add them up."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "reason": None}
    for event in events[:-1]:
        for choice in event["choices"]:
            assert message["reason"] is None, "nothing comes after the finish_reason"
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["type"] == "function" and call["id"]
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    own = message["tool_calls"][call["index"]]
                    own["arguments"] += call["function"]["arguments"]
            message["reason"] = choice["finish_reason"]
    return message


def test_calls_whole_and_streamed() -> None:
    async def test() -> None:
        async with saying(THOUGHT + "Let me see.\n" + CALLS) as server:
            choice = await whole(server, chat(tools=TOOLS))
            events = await server.events(CHAT, chat(tools=TOOLS))
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"].strip() == "Let me see."
        assert message["reasoning"].strip() == "Hm, grün?"
        assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
        functions = [call["function"] for call in message["tool_calls"]]
        assert [f["name"] for f in functions] == ["get_weather", "get_time"]
        assert [f["arguments"] for f in functions] == ARGUMENTS
        streamed = added_up(events)
        assert streamed["reason"] == "tool_calls"
        assert streamed["content"] == message["content"]
        assert streamed["reasoning"] == message["reasoning"]
        assert [c["arguments"] for c in streamed["tool_calls"]] == ARGUMENTS
        assert len({c["id"] for c in streamed["tool_calls"]}) == 2
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[-2]["choices"][0]["delta"] == {}
        assert events[-1] == "[DONE]"

    run(test())


def test_only_calls_have_no_content() -> None:
    async def test() -> None:
        async with saying(CALLS) as server:
            choice = await whole(server, chat(tools=TOOLS))
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning"] is None

    run(test())


def test_arguments_stream_as_they_come() -> None:
    async def test() -> None:
        async with saying(CALLS) as server:
            events = await server.events(CHAT, chat(tools=TOOLS[:1]))
        pieces = [
            call["function"]["arguments"]
            for event in events[:-1]
            for call in event["choices"][0]["delta"].get("tool_calls", ())
            if call["index"] == 0
        ]
        assert "".join(pieces) == ARGUMENTS[0]
        assert len(pieces) > 5

    run(test())


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_that_may_be_called_calls_are_text(fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with saying(CALLS) as server:
            choice = await whole(server, chat(**fields))
            events = await server.events(CHAT, chat(**fields))
        assert choice["message"]["content"] == added_up(events)["content"] == CALLS
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"

    run(test())


def test_parallel_tool_calls_false_keeps_the_first() -> None:
    async def test() -> None:
        async with saying(CALLS) as server:
            body = chat(tools=TOOLS, parallel_tool_calls=False)
            choice = await whole(server, body)
            streamed = added_up(await server.events(CHAT, body))
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS[0]}
        assert [c["name"] for c in streamed["tool_calls"]] == ["get_weather"]
        assert streamed["content"] == ""

    run(test())


def test_allowed_tools_are_the_only_ones() -> None:
    async def test() -> None:
        allowed = {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "get_time"}}],
        }
        choice_of_tools = {"type": "allowed_tools", "allowed_tools": allowed}
        async with saying(CALLS) as server:
            choice = await whole(server, chat(tools=TOOLS, tool_choice=choice_of_tools))
        assert "{1 tools}" in server.engine.seen[0].prompt
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_time"
        assert "get_weather" in choice["message"]["content"]  # it calls nothing, so it is text

    run(test())


def test_functions_are_the_old_form() -> None:
    async def test() -> None:
        functions = [tool["function"] for tool in TOOLS]
        body = chat(functions=functions, function_call="auto")
        async with saying(CALLS) as server:
            choice = await whole(server, body)
            events = await server.events(CHAT, body)
        called = {"name": "get_weather", "arguments": ARGUMENTS[0]}
        assert choice["message"]["function_call"] == called
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "function_call"
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert pieces[0] == {"name": "get_weather", "arguments": ""}
        assert "".join(piece["arguments"] for piece in pieces) == ARGUMENTS[0]
        assert events[-2]["choices"][0]["finish_reason"] == "function_call"

    run(test())


def test_reasoning_can_be_left_out() -> None:
    async def test() -> None:
        async with saying(THOUGHT + "Yes.") as server:
            told = await whole(server, chat())
            untold = await whole(server, chat(include_reasoning=False))
            events = await server.events(CHAT, chat(include_reasoning=False))
            _, body = await server.post(CHAT, chat())
        assert told["message"]["reasoning"].strip() == "Hm, grün?"
        assert untold["message"]["reasoning"] is None
        assert untold["message"]["content"] == told["message"]["content"]
        streamed = added_up(events)
        assert (streamed["reasoning"], streamed["content"]) == ("", told["message"]["content"])
        num_tokens = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert len("Hm, grün?".encode()) <= num_tokens <= len(THOUGHT.encode())

    run(test())


def test_logprobs_ids_and_usage_are_those_of_all_tokens() -> None:
    """Where the parser holds text back, what its tokens bring comes with the next chunk."""

    async def test() -> None:
        script = THOUGHT + CALLS
        body = chat(tools=TOOLS, logprobs=True, top_logprobs=1, return_token_ids=True)
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with saying(script) as server:
            choice = await whole(server, body)
            events = await server.events(CHAT, {**body, "stream_options": options})
        expected = list(script.encode())
        assert choice["token_ids"] == expected
        assert [p["bytes"] for p in choice["logprobs"]["content"]] == [[i] for i in expected]
        choices = [event["choices"][0] for event in events[:-2]]
        assert [i for c in choices for i in c.get("token_ids", ())] == expected
        positions = [p for c in choices for p in (c["logprobs"] or {"content": ()})["content"]]
        assert [p["bytes"] for p in positions] == [[i] for i in expected]
        assert events[0]["prompt_token_ids"] == list(server.engine.seen[0].token_ids)
        counts = [e["usage"]["completion_tokens"] for e in events[1:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == len(expected)

    run(test())


def test_several_choices() -> None:
    async def test() -> None:
        async with saying(CALLS) as server:
            _, body = await server.post(CHAT, chat(tools=TOOLS, n=2))
            events = await server.events(CHAT, chat(tools=TOOLS, n=2))
        ids = [call["id"] for c in body["choices"] for call in c["message"]["tool_calls"]]
        assert len(set(ids)) == 4
        for index in (0, 1):
            own = [e for e in events[:-1] if e["choices"][0]["index"] == index]
            assert len(added_up([*own, "[DONE]"])["tool_calls"]) == 2

    run(test())


def test_a_call_that_is_cut_short() -> None:
    async def test() -> None:
        body = chat(tools=TOOLS, max_tokens=65)
        async with saying(CALLS) as server:
            choice = await whole(server, body)
            streamed = added_up(await server.events(CHAT, body))
        assert choice["finish_reason"] == streamed["reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert ARGUMENTS[0].startswith(call["function"]["arguments"][:9])
        assert streamed["tool_calls"][0]["arguments"] == call["function"]["arguments"]

    run(test())


def test_switched_off() -> None:
    async def test() -> None:
        async with saying(CALLS, enable_auto_tool_choice=False) as server:
            status, body = await server.post(CHAT, chat(tools=TOOLS))
            assert (status, body["error"]["param"]) == (400, "tools")
        async with saying(THOUGHT + CALLS, tool_call_parser="none") as server:
            status, body = await server.post(CHAT, chat(tools=TOOLS))
            assert (status, body["error"]["param"]) == (400, "tools")
            choice = await whole(server, chat())
            assert choice["message"]["reasoning"]

    run(test())


def test_unknown_parsers_are_said_at_start() -> None:
    async def test() -> None:
        async with serving(tool_call_parser="nobodys"):
            pass

    with pytest.raises(ValueError, match="nobodys"):
        run(test())


def test_an_error_in_the_middle_is_an_event() -> None:
    async def test() -> None:
        async with saying(THOUGHT) as server:
            body = {"messages": [{"role": "user", "content": "<fail>"}]}
            events = await server.events(CHAT, body)
            status, answer = await server.post(CHAT, body)
        assert "[DONE]" not in events
        assert events[-1]["error"]["type"] == "server_error"
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert json.dumps(events).count("delta") == 1  # the role: the text was still held back

    run(test())
