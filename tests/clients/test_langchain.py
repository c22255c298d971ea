"""langchain-openai's ChatOpenAI: invoke, stream, tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.questions import (
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


def chat(url: str, **more: Any) -> ChatOpenAI:
    own: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "max_retries": 0, **more}
    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", **own)


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return WEATHER_RESULT


def test_invoke_and_stream(tiny: str) -> None:
    answer = chat(tiny).invoke(SUM)
    assert answer.content == SUM_ANSWER
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    pieces = list(chat(tiny, stream_usage=True).stream(SUM))
    assert "".join(str(piece.content) for piece in pieces) == SUM_ANSWER
    assert any(piece.usage_metadata for piece in pieces)


def test_async(tiny: str) -> None:
    async def test() -> None:
        assert (await chat(tiny).ainvoke(SUM)).content == SUM_ANSWER
        pieces = [piece.content async for piece in chat(tiny).astream(SUM)]
        assert "".join(map(str, pieces)) == SUM_ANSWER

    asyncio.run(test())


def test_tools(tiny: str) -> None:
    model = chat(tiny).bind_tools([get_weather])
    question = [HumanMessage(WEATHER[0]["content"])]
    answer = model.invoke(question)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", WEATHER_ARGUMENTS)
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([*question, answer, result]).content == WEATHER_ANSWER
    whole: AIMessageChunk | None = None
    for piece in model.stream(question):
        assert isinstance(piece, AIMessageChunk)
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert [call["args"] for call in whole.tool_calls] == [WEATHER_ARGUMENTS]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(tiny: str, method: Any) -> None:
    model = chat(tiny).with_structured_output(Person, method=method)
    assert isinstance(model.invoke(RECORD), Person)


def test_forced_tools(tiny: str) -> None:
    for choice in ("any", "get_weather"):
        model = chat(tiny).bind_tools([get_weather], tool_choice=choice)
        (call,) = model.invoke("Hello").tool_calls
        assert call["name"] == "get_weather"
