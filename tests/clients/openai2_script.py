"""Run by test_openai2.py in a process of its own, where `openai` is 2.x. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

from tests.clients.questions import (
    GET_WEATHER,
    MODEL,
    RECORD,
    SUM,
    WEATHER,
    Person,
)


class GetWeather(BaseModel):
    """Get the weather in a city"""

    city: str


GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 64}


def sync_answers(url: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
        create = api.chat.completions.create
        called = create(messages=WEATHER, tools=[GET_WEATHER], **GREEDY).choices[0]
        person = api.chat.completions.parse(messages=RECORD, response_format=Person, **GREEDY)
        try:
            create(messages=SUM, model=MODEL, temperature=-1)
        except openai.BadRequestError as error:
            param = error.param
        return {
            "whole": create(messages=SUM, **GREEDY).choices[0].message.content,
            "called": called.message.tool_calls[0].function.model_dump(),
            "finish_reason": called.finish_reason,
            "is_person": isinstance(person.choices[0].message.parsed, Person),
            "param": param,
            "models": [model.id for model in api.models.list()],
        }


async def async_answers(url: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        chunks = await api.chat.completions.create(messages=SUM, stream=True, **GREEDY)
        streamed = "".join([c.choices[0].delta.content or "" async for c in chunks])
        strict = openai.pydantic_function_tool(GetWeather, name="get_weather")
        async with api.chat.completions.stream(
            messages=WEATHER, tools=[strict], **GREEDY
        ) as stream:
            final = await stream.get_final_completion()
        return {
            "streamed": streamed,
            "streamed_city": final.choices[0].message.tool_calls[0].function.parsed_arguments.city,
        }


def main() -> None:
    url = sys.argv[1]
    answers = sync_answers(url) | asyncio.run(async_answers(url))
    print(json.dumps({"version": openai.__version__, **answers}))


if __name__ == "__main__":
    main()
