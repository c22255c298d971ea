"""openai 3.x against the built-in model: what its users write, sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.conftest import Scripted
from tests.clients.questions import (
    GET_WEATHER,
    GREETING,
    MODEL,
    RECORD,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_ARGUMENTS,
    WEATHER_RESULT,
    Person,
)

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 64}


def sync_client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0)


def test_is_the_version_that_is_meant() -> None:
    assert openai.__version__.startswith("3.")


def test_answers(tiny: str) -> None:
    with sync_client(tiny) as api:
        answer = api.chat.completions.create(messages=SUM, **GREEDY)
        message = answer.choices[0].message
        assert message.content == SUM_ANSWER
        assert (message.role, message.refusal, message.annotations) == ("assistant", None, [])
        assert (answer.service_tier, answer.object) == ("default", "chat.completion")
        assert answer.system_fingerprint and answer.usage and answer.usage.prompt_tokens_details
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        chunks = list(api.chat.completions.create(messages=SUM, stream=True, **GREEDY))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == SUM_ANSWER
        assert {c.system_fingerprint for c in chunks} == {answer.system_fingerprint}


def test_reasoning(tiny: str) -> None:
    with sync_client(tiny) as api:
        fields: dict[str, Any] = {**GREEDY, "messages": SUM, "reasoning_effort": "high"}
        answer = api.chat.completions.create(**fields)
        reasoning = (answer.choices[0].message.model_extra or {})["reasoning"]
        assert "12 + 30" in reasoning
        assert answer.choices[0].message.content == SUM_ANSWER
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) > 5
        streamed = ""
        for chunk in api.chat.completions.create(stream=True, **fields):
            streamed += (chunk.choices[0].delta.model_extra or {}).get("reasoning", "")
        assert streamed == reasoning


def test_a_tool_is_called_and_its_result_answered(tiny: str) -> None:
    with sync_client(tiny) as api:
        fields: dict[str, Any] = {**GREEDY, "tools": [GET_WEATHER]}
        answer = api.chat.completions.create(messages=WEATHER, **fields)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == WEATHER_ARGUMENTS
        result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
        history = [*WEATHER, choice.message.model_dump(exclude_none=True), result]
        final = api.chat.completions.create(messages=history, **fields)
        assert final.choices[0].message.content == WEATHER_ANSWER


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_tool_that_must_be_called(tiny: str, tool_choice: Any) -> None:
    with sync_client(tiny) as api:
        answer = api.chat.completions.create(
            messages=GREETING, tools=[GET_WEATHER], tool_choice=tool_choice, **GREEDY
        )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_parse_into_a_model(tiny: str) -> None:
    with sync_client(tiny) as api:
        answer = api.chat.completions.parse(messages=RECORD, response_format=Person, **GREEDY)
        person = answer.choices[0].message.parsed
        assert isinstance(person, Person)
        hot = api.chat.completions.parse(
            messages=RECORD, response_format=Person, model=MODEL, temperature=1, seed=5
        )
        assert isinstance(hot.choices[0].message.parsed, Person)


def test_parse_the_arguments_of_a_tool(tiny: str) -> None:
    class GetWeather(BaseModel):
        """Get the weather in a city"""

        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with sync_client(tiny) as api:
        answer = api.chat.completions.parse(messages=WEATHER, tools=[tool], **GREEDY)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_async_and_its_stream_helper(tiny: str) -> None:
    async def test() -> None:
        async with AsyncOpenAI(base_url=tiny, api_key="none", max_retries=0) as api:
            async with api.chat.completions.stream(
                messages=RECORD, response_format=Person, **GREEDY
            ) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_completion()
            assert isinstance(final.choices[0].message.parsed, Person)
            assert {"content.delta", "content.done", "chunk"} <= kinds
            async with api.chat.completions.stream(
                messages=WEATHER, tools=[GET_WEATHER], stream_options={"include_usage": True},
                **GREEDY,
            ) as stream:  # fmt: skip
                done = [
                    event.arguments
                    async for event in stream
                    if event.type == "tool_calls.function.arguments.done"
                ]
                final = await stream.get_final_completion()
            assert [json.loads(arguments) for arguments in done] == [WEATHER_ARGUMENTS]
            (call,) = final.choices[0].message.tool_calls or []
            assert call.function.name == "get_weather"
            assert final.usage is not None and final.usage.completion_tokens > 0
            parsed = await api.chat.completions.parse(
                messages=RECORD, response_format=Person, **GREEDY
            )
            assert isinstance(parsed.choices[0].message.parsed, Person)

    asyncio.run(test())


def test_completions_held_to_a_format(tiny: str) -> None:
    with sync_client(tiny) as api:
        answer = api.completions.create(
            model=MODEL, prompt="A colour:", max_tokens=20,
            extra_body={"structured_outputs": {"choice": ["red", "green"]}},
        )  # fmt: skip
        assert answer.choices[0].text in ("red", "green")
        assert answer.choices[0].finish_reason == "stop"


def test_several_calls_as_events(scripted: Scripted) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
    scripted.say("I look.\n" + call % "Köln" + "\n" + call % "Bonn")
    with (
        sync_client(scripted.url) as api,
        api.chat.completions.stream(model="fake", messages=SUM, tools=[GET_WEATHER]) as stream,
    ):
        kinds = [event.type for event in stream if event.type != "chunk"]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    cities = [json.loads(call.function.arguments)["city"] for call in calls]
    assert cities == ["Köln", "Bonn"]
    assert len({call.id for call in calls}) == 2
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert (final.choices[0].message.content or "").strip() == "I look."


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"response_format": BAD_SCHEMA}, "response_format"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}, "audio"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tiny: str, fields: dict[str, Any], param: str) -> None:
    with sync_client(tiny) as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(messages=SUM, model=MODEL, **fields)
    assert caught.value.param == param


def test_too_short_for_the_format_is_the_clients_error(tiny: str) -> None:
    with sync_client(tiny) as api, pytest.raises(openai.LengthFinishReasonError):
        api.chat.completions.parse(
            messages=RECORD, model=MODEL, max_tokens=3, response_format=Person
        )
