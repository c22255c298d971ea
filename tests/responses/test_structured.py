"""Answers that must be a record or a call, by the clients' own helpers, from the built-in model."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from asyncllm import AsyncLLMEngine
from tests.server.http_harness import run, serving

RECORD = "Anna is 31 years old. Give her name and age as JSON."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
GREETING = "Hello, who are you?"  # nothing to call a function for
COMMON: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 60}


class Person(BaseModel):
    name: str
    age: int


ANNA = Person(name="Anna", age=31)


@pytest.mark.slow
def test_records_and_forced_calls_of_responses() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2, swap_space=0)
        async with (
            serving(engine) as server,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as api,
        ):
            parsed = await api.responses.parse(input=RECORD, text_format=Person, **COMMON)
            assert parsed.output_parsed == ANNA
            assert parsed.text.format.type == "json_schema"
            async with api.responses.stream(input=RECORD, text_format=Person, **COMMON) as stream:
                assert (await stream.get_final_response()).output_parsed == ANNA
            chosen = {"type": "function", "name": "get_weather"}
            allowed = {"type": "allowed_tools", "mode": "required", "tools": [chosen]}
            for choice in ("required", chosen, allowed):
                answer = await api.responses.create(
                    input=GREETING,
                    tools=[FUNCTION],
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    **COMMON,
                )
                (call,) = answer.output
                assert (call.type, call.name) == ("function_call", "get_weather")

    run(test())


@pytest.mark.slow
def test_records_and_forced_calls_of_messages() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2, swap_space=0)
        async with (
            serving(engine) as server,
            AsyncAnthropic(base_url=server.url, api_key="key", max_retries=0) as api,
        ):
            common = {"model": "tiny", "max_tokens": 60, "extra_body": {"temperature": 0}}
            messages = [{"role": "user", "content": RECORD}]
            parsed = await api.messages.parse(messages=messages, output_format=Person, **common)
            assert parsed.parsed_output == ANNA
            messages = [{"role": "user", "content": GREETING}]
            for kind in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
                answer = await api.messages.create(
                    messages=messages,
                    tools=[TOOL],
                    tool_choice={**kind, "disable_parallel_tool_use": True},
                    **common,
                )
                (call,) = answer.content
                assert (call.name, list(call.input)) == ("get_weather", ["city"])
                assert answer.stop_reason == "tool_use"

    run(test())


RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    RESPONSE: {"input": "Hi"},
    MESSAGE: {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSE, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSE, {"tools": [FUNCTION], "tool_choice": {**FUNCTION, "name": "x"}}, "tool_choice"),
        (RESPONSE, {"tools": [{**FUNCTION, "name": "not a name"}]}, "tools"),
        (RESPONSE, {"tools": [FUNCTION, FUNCTION]}, "tools"),
        (RESPONSE, {"tools": [{**FUNCTION, "parameters": {"type": "array"}}]}, "tools"),
        (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {
            "$ref": "http://example.com/schema"}}}}, "text"),
        (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {
            "type": "string", "pattern": "("}}}}, "text"),
        (MESSAGE, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGE, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        (MESSAGE, {"tools": [TOOL, TOOL]}, "tools"),
        (MESSAGE, {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools"),
        (MESSAGE, {"output_config": {"format": {"type": "json_schema", "schema": {
            "$ref": "http://example.com/schema"}}}}, "output_config"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_refused(path: str, fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2, swap_space=0)
        async with serving(engine) as server:
            status, answer = await server.post(path, {**ASKED[path], **fields})
            assert status == 400, answer
            if path == RESPONSE:
                assert (answer["error"]["param"] or "").startswith(param), answer
            else:
                assert param in answer["error"]["message"]

    run(test())
