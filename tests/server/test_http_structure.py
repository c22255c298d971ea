"""`response_format`, `structured_outputs` and forced tools: what they become, what is refused.

What reaches the engine is seen in the fake one; tests/clients see that it holds.
"""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, ReasoningMarkers, StructuredOutputsParams
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving
from tests.server.test_http_tools import TOOLS, saying

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a>"],
}


async def structure(server: Server, path: str, **fields: Any) -> StructuredOutputsParams | None:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    status, body = await server.post(path, {**prompt, "max_tokens": 1, **fields})
    assert status == 200, body
    return server.engine.seen[-1].params.structured_outputs


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": json_schema(SCHEMA, strict=True)}, {"json": SCHEMA}),
        ({"response_format": json_schema(None)}, {"json_object": True}),
        ({"response_format": json_schema({})}, {"json": {}}),
        ({"response_format": TAG}, {"structural_tag": TAG}),
        ({"response_format": OLD_TAG}, {"structural_tag": OLD_TAG}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, {"json": '{"type": "object"}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            {"regex": "a"},
        ),
    ],
)
def test_what_the_engine_is_asked(
    path: str, fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    async def test() -> None:
        async with serving() as server:
            found = await structure(server, path, **fields)
        assert found == (expected and StructuredOutputsParams(**expected))

    run(test())


def test_reasoning_comes_before_what_is_held_to_a_format() -> None:
    async def test() -> None:
        async with saying("{}") as server:
            wanted = {"response_format": {"type": "json_object"}}
            found = await structure(server, CHAT, **wanted)
            assert found is not None
            assert found.after == ReasoningMarkers("</think>", "<think>")
            # The template has opened it, or has been told that there is none.
            opened = [*HELLO, {"role": "assistant", "content": "<think>\nHm"}]
            found = await structure(
                server, CHAT, messages=opened, continue_final_message=True, **wanted
            )
            assert found is not None and found.after == ReasoningMarkers("</think>")
            closed = [*HELLO, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]
            found = await structure(
                server, CHAT, messages=closed, continue_final_message=True, **wanted
            )
            assert found is not None and found.after is None
            found = await structure(server, COMPLETIONS, **wanted)
            assert found is not None and found.after is None

    run(test())


REMOTE = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(40_000)}}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(80):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BOTH = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (BOTH, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": json_schema([])}, "response_format"),
    ({"response_format": json_schema(REMOTE)}, "response_format"),
    ({"response_format": json_schema({"type": "spreadsheet"})}, "response_format"),
    ({"response_format": json_schema({"not": {"type": "null"}})}, "response_format"),
    ({"response_format": json_schema(MANY)}, "response_format"),
    ({"response_format": json_schema(DEEP)}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": 2}}, "structured_outputs"),
]


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_refused_by_name_before_anything_is_queued(path: str) -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=128, num_gpu_blocks_override=50)
        prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
        async with serving(engine) as server:
            for fields, param in REFUSED:
                for stream in (False, True):
                    status, body = await server.post(path, {**prompt, **fields, "stream": stream})
                    assert (status, body["error"]["param"]) == (400, param), fields
                    if param == "response_format":
                        assert "structured_outputs" not in body["error"]["message"]

    run(test())


def test_tools_and_a_format_that_exclude_each_other() -> None:
    async def test() -> None:
        async with saying("{}") as server:
            body = {
                "messages": HELLO,
                "tools": TOOLS,
                "tool_choice": "required",
                "structured_outputs": {"regex": "a"},
            }
            status, answer = await server.post(CHAT, body)
            assert (status, answer["error"]["param"]) == (400, "structured_outputs")

    run(test())


STRICT_TOOLS = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "get_time"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("fields", "words", "missing"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, ["get_weather", "get_time"], []),
        ({"tools": TOOLS, "tool_choice": NAMED}, ["get_time"], ["get_weather"]),
        ({"tools": TOOLS, "tool_choice": ALLOWED}, ["get_time"], ["get_weather"]),
        ({"tools": STRICT_TOOLS}, ["get_weather", "get_time"], []),
        (
            {"functions": [t["function"] for t in TOOLS], "function_call": {"name": "get_time"}},
            ["get_time"],
            ["get_weather"],
        ),
    ],
)
def test_calls_are_forced_by_a_grammar(
    fields: dict[str, Any], words: list[str], missing: list[str]
) -> None:
    async def test() -> None:
        async with saying("Hm") as server:
            found = await structure(server, CHAT, **fields)
            assert found is not None and found.grammar is not None
            assert found.after == ReasoningMarkers("</think>", "<think>")
            assert all(word in found.grammar for word in words)
            assert not any(word in found.grammar for word in missing)
            # Content has no say where a tool must be called, and none has a grammar otherwise.
            both = await structure(server, CHAT, **fields, response_format={"type": "json_object"})
            assert both is not None
            if "tool_choice" in fields or "function_call" in fields:
                assert both == found
            else:
                assert both.json_object and "get_time" in str(both.alternative)
            assert await structure(server, CHAT, tools=TOOLS) is None

    run(test())


def test_a_model_without_a_format_is_forced_to_one() -> None:
    async def test() -> None:
        async with serving() as server:
            found = await structure(server, CHAT, tools=TOOLS, tool_choice="required")
            assert found is not None and found.grammar is not None
            server.engine.script = '{"name": "get_time", "parameters": {}}'
            body = {"messages": HELLO, "tools": TOOLS, "tool_choice": NAMED}
            _, answer = await server.post(CHAT, body)
        (choice,) = answer["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_time"
        assert choice["finish_reason"] == "stop"  # as OpenAI, where the tool was named

    run(test())
