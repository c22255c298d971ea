"""The built-in model through Anthropic's client: a call and its result, a thought, a prefill."""

from __future__ import annotations

import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from asyncllm import AsyncLLMEngine
from tests.server.http_harness import run, serving

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ROME = {"role": "user", "content": "How is the weather in Rome today?"}
FRANCE = {"role": "user", "content": "What is the capital of France?"}


@pytest.mark.slow
def test_the_tool_runner() -> None:
    """It asks for a conversation held by the server first, and goes on without."""
    asked: list[str] = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Get the weather of a city"""
        asked.append(city)
        return '{"weather": "sunny", "temperature": 20}'

    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2, swap_space=0)
        async with (
            serving(engine) as server,
            AsyncAnthropic(base_url=server.url, api_key="key", max_retries=0) as api,
        ):
            runner = api.beta.messages.tool_runner(
                model="tiny",
                max_tokens=60,
                messages=[ROME],
                tools=[get_weather],
                extra_body={"temperature": 0},
            )
            final = await runner.until_done()
        assert asked == ["Rome"]
        assert final.stop_reason == "end_turn" and "sunny" in final.content[0].text

    run(test())


@pytest.mark.slow
def test_what_the_model_says() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2, swap_space=0)
        async with (
            serving(engine) as server,
            AsyncAnthropic(base_url=server.url, api_key="key", max_retries=0) as api,
        ):

            async def say(*messages: object, **fields: object) -> object:
                extra = {"temperature": 0, "chat_template_kwargs": fields.pop("kwargs", None)}
                return await api.messages.create(
                    model="tiny", max_tokens=60, messages=messages, extra_body=extra, **fields
                )

            asked = await say(ROME, tools=[WEATHER])
            (call,) = asked.content
            assert asked.stop_reason == "tool_use"
            assert (call.name, call.input) == ("get_weather", {"city": "Rome"})
            result = {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": '{"weather": "sunny", "temperature": 20}',
            }
            answer = await say(
                ROME, asked.to_param(), {"role": "user", "content": [result]}, tools=[WEATHER]
            )
            assert answer.stop_reason == "end_turn" and "sunny" in answer.content[0].text

            thought = await say(FRANCE, kwargs={"enable_thinking": True})
            assert [block.type for block in thought.content] == ["thinking", "text"]
            assert thought.usage.output_tokens_details.thinking_tokens > 0
            budget = {"type": "enabled", "budget_tokens": 3}
            hasty = await say(FRANCE, thinking=budget)
            assert len(hasty.content[0].thinking) < len(thought.content[0].thinking)
            assert hasty.content[1].text == thought.content[1].text
            prefilled = await say(FRANCE, {"role": "assistant", "content": "The capital of"})
            assert prefilled.content[0].text == " France is Paris."
            stopped = await say(FRANCE, stop_sequences=["Par"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Par")
            assert stopped.content[0].text == "The capital of France is "

    run(test())
