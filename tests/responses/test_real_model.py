"""The built-in model through OpenAI's client: a call, its result by `previous_response_id`."""

from __future__ import annotations

import json

import pytest
from openai import AsyncOpenAI

from asyncllm import AsyncLLMEngine
from tests.server.http_harness import run, serving

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.mark.slow
def test_what_the_model_says() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2, swap_space=0)
        async with (
            serving(engine) as server,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as api,
        ):
            common = {"model": "tiny", "temperature": 0, "max_output_tokens": 60}
            asked = await api.responses.create(
                input="How is the weather in Rome today?", tools=[WEATHER], **common
            )
            (call,) = asked.output
            assert (call.type, call.name) == ("function_call", "get_weather")
            assert json.loads(call.arguments) == {"city": "Rome"}
            result = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": '{"weather": "sunny", "temperature": 20}',
            }
            async with api.responses.stream(
                input=[result], previous_response_id=asked.id, tools=[WEATHER], **common
            ) as stream:
                answer = await stream.get_final_response()
            assert "sunny" in answer.output_text and "Rome" in answer.output_text
            assert answer.usage.input_tokens_details.cached_tokens > 0

            thought = await api.responses.create(
                input="What is 17 plus 25?", reasoning={"effort": "low"}, **common
            )
            assert [item.type for item in thought.output] == ["reasoning", "message"]
            assert "42" in thought.output_text
            assert thought.usage.output_tokens_details.reasoning_tokens > 0

    run(test())
