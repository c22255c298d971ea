"""litellm, as `hosted_vllm/` and as `openai/`: what a proxy in front of this server does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.clients.questions import (
    GET_WEATHER,
    MODEL,
    RECORD,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ARGUMENTS,
    Person,
)

PROVIDERS = ("openai", "hosted_vllm")


def fields(provider: str, url: str, **more: Any) -> dict[str, Any]:
    model = f"{provider}/{MODEL}"
    own = {"model": model, "api_base": url, "api_key": "none", "num_retries": 0}
    return {**own, "temperature": 0, "max_tokens": 64, **more}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_completion_and_stream(tiny: str, provider: str) -> None:
    answer = litellm.completion(messages=SUM, **fields(provider, tiny))
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.usage.completion_tokens > 0
    chunks = litellm.completion(messages=SUM, stream=True, **fields(provider, tiny))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == SUM_ANSWER


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools(tiny: str, provider: str) -> None:
    asked = fields(provider, tiny, tools=[GET_WEATHER], tool_choice="auto")
    answer = litellm.completion(messages=WEATHER, **asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == WEATHER_ARGUMENTS
    chunks = list(litellm.completion(messages=WEATHER, stream=True, **asked))
    whole = litellm.stream_chunk_builder(chunks, messages=WEATHER)
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == WEATHER_ARGUMENTS


def test_a_format_and_reasoning(tiny: str) -> None:
    answer = litellm.completion(
        messages=RECORD, response_format=Person, **fields("hosted_vllm", tiny)
    )
    Person.model_validate_json(answer.choices[0].message.content)
    thought = litellm.completion(
        messages=SUM, reasoning_effort="high", **fields("hosted_vllm", tiny)
    )
    assert "12 + 30" in thought.choices[0].message.reasoning_content
    assert thought.choices[0].message.content == SUM_ANSWER


def test_async_and_errors(tiny: str) -> None:
    async def test() -> None:
        answer = await litellm.acompletion(messages=SUM, **fields("openai", tiny))
        assert answer.choices[0].message.content == SUM_ANSWER
        with pytest.raises(litellm.BadRequestError, match="top_k"):
            await litellm.acompletion(
                messages=SUM, **fields("openai", tiny, extra_body={"top_k": -7})
            )
        with pytest.raises(litellm.NotFoundError):
            await litellm.acompletion(messages=SUM, **fields("openai", tiny, model="openai/other"))

    asyncio.run(test())
