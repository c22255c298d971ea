"""OpenAI's own client of /v1/responses, as its users write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI

from tests.server.fake_engine import FakeEngine, reply
from tests.server.http_harness import run, serving, until
from tests.server.scripted import NAMES, PARAMETERS, script

TOOLS = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in NAMES
]


@asynccontextmanager
async def client(**args: object) -> AsyncIterator[tuple[AsyncOpenAI, FakeEngine]]:
    async with (
        serving(**args) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as api,
    ):
        yield api, server.engine
        await server.quiet()


def test_response() -> None:
    async def test() -> None:
        async with client(api_key=["key"]) as (api, engine):
            answer = await api.responses.create(
                model="fake",
                input="Hello",
                instructions="Be brief.",
                max_output_tokens=100,
                temperature=0.25,
                top_p=0.5,
                metadata={"a": "b"},
                extra_body={"top_k": 7, "seed": 3},
            )
            assert answer.output_text == reply(0)
            assert answer.id.startswith("resp_") and answer.status == "completed"
            assert answer.output[0].role == "assistant" and answer.output[0].status == "completed"
            assert (answer.temperature, answer.top_p, answer.metadata) == (0.25, 0.5, {"a": "b"})
            assert answer.usage.output_tokens == len(reply(0).encode())
            assert answer.usage.input_tokens == len(engine.seen[0].token_ids)
            assert answer.usage.input_tokens_details.cached_tokens > 0
            params = engine.seen[0].params
            assert (params.max_tokens, params.temperature, params.top_p) == (100, 0.25, 0.5)
            assert (params.top_k, params.seed) == (7, 3)
            assert engine.seen[0].prompt.startswith("<system>Be brief.<user>")

    run(test())


def test_a_limit_makes_it_incomplete() -> None:
    async def test() -> None:
        async with client() as (api, _):
            answer = await api.responses.create(model="fake", input="Hello", max_output_tokens=5)
            assert answer.output_text == reply(0)[:5]
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert answer.output[0].status == "incomplete"
            async with api.responses.stream(
                model="fake", input="Hello", max_output_tokens=5
            ) as stream:
                events = [event async for event in stream]
            assert events[-1].type == "response.incomplete"
            assert events[-1].response.output_text == reply(0)[:5]

    run(test())


def test_stream() -> None:
    async def test() -> None:
        async with client() as (api, _):
            stream = await api.responses.create(model="fake", input="Hello", stream=True)
            events = [event async for event in stream]
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == [
            "output_text.done", "content_part.done", "output_item.done", "completed"
        ]  # fmt: skip
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.output_text == reply(0)

    run(test())


@pytest.mark.parametrize("summary", [None, "auto"])
def test_stream_helper(summary: str | None) -> None:
    """The accumulating helper of the client checks the shape and order of every event."""

    async def test() -> None:
        async with client() as (api, engine):
            script(engine)
            async with api.responses.stream(
                model="fake", input="Hello", tools=TOOLS, reasoning={"summary": summary}
            ) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert "{2 tools}" in engine.seen[0].prompt
            assert 0 < final.usage.output_tokens_details.reasoning_tokens < 30
        word = "summary" if summary else "content"
        kind = "reasoning_summary_text" if summary else "reasoning_text"
        assert kinds.count(f"response.{kind}.delta") > 1
        assert kinds.count(f"response.{kind}.done") == 1
        reasoning, message, weather, time = final.output
        assert "".join(part.text for part in getattr(reasoning, word)) == "Grün?"
        assert message.content[0].text == final.output_text == "I will ask."
        assert (weather.type, weather.name) == ("function_call", "weather")
        assert weather.arguments == '{"city": "Köln"}'
        assert (time.name, time.arguments) == ("time", "{}")
        assert weather.call_id != time.call_id

    run(test())


def test_whole_is_what_the_stream_adds_up_to() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            script(engine)
            args = {"model": "fake", "input": "Hello", "tools": TOOLS}
            whole = await api.responses.create(**args)
            async with api.responses.stream(**args) as stream:
                streamed = await stream.get_final_response()
        bodies = [answer.model_dump() for answer in (whole, streamed)]
        for body in bodies:
            for key in ("id", "created_at", "completed_at"):
                body.pop(key)
            for item in body["output"]:
                item.pop("id")
                item.pop("call_id", None)
                item.pop("parsed_arguments", None)
                for part in item.get("content") or ():
                    part.pop("parsed", None)
        assert bodies[0] == bodies[1]

    run(test())


def test_a_conversation_goes_on() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            script(engine)
            first = await api.responses.create(
                model="fake", input="Weather?", instructions="Only this time.", tools=TOOLS
            )
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
                for item in first.output
                if item.type == "function_call"
            ]
            async with api.responses.stream(
                model="fake", input=results, previous_response_id=first.id, tools=TOOLS
            ) as stream:
                second = await stream.get_final_response()
            third = await api.responses.create(
                model="fake", input="Thanks", previous_response_id=second.id, tools=TOOLS
            )
            assert third.previous_response_id == second.id
            prompt = engine.seen[-1].prompt
            assert "Only this time." not in prompt and prompt.count("I will ask.") == 2
            roles = ["<user>", "<assistant>", "<tool>rain<tool>rain", "<assistant>", "<user>"]
            places = []
            for role in roles:
                places.append(prompt.index(role, places[-1] + 1 if places else 0))
            # The same by hand: what came out goes in again.
            await api.responses.create(
                model="fake",
                store=False,
                tools=TOOLS,
                input=[
                    {"role": "user", "content": "Weather?"},
                    *[item.model_dump(exclude_none=True) for item in first.output],
                    *results,
                    *[{"type": "item_reference", "id": item.id} for item in second.output],
                    {"role": "user", "content": [{"type": "input_text", "text": "Thanks"}]},
                ],
            )
            assert engine.seen[-1].prompt == prompt

    run(test())


def test_what_is_kept() -> None:
    async def test() -> None:
        async with client(api_key=["key", "other"]) as (api, _):
            answer = await api.responses.create(
                model="fake",
                input=[
                    {"role": "user", "content": "One"},
                    {"role": "assistant", "content": "Two"},
                    {"role": "user", "content": "Three"},
                ],
            )
            assert await api.responses.retrieve(answer.id) == answer
            items = [item async for item in api.responses.input_items.list(answer.id, limit=2)]
            assert [item.content[0].text for item in items] == ["Three", "Two", "One"]
            items = await api.responses.input_items.list(answer.id, order="asc")
            assert [item.role for item in items.data] == ["user", "assistant", "user"]
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await api.responses.cancel(answer.id)
            # With another key it is not there.
            other = api.with_options(api_key="other")
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(answer.id)
            with pytest.raises(openai.BadRequestError) as caught:
                await other.responses.create(
                    model="fake", input="x", previous_response_id=answer.id
                )
            assert caught.value.code == "previous_response_not_found"
            await api.responses.delete(answer.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(answer.id)
            forgotten = await api.responses.create(model="fake", input="x", store=False)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(forgotten.id)

    run(test())


def test_logprobs() -> None:
    async def test() -> None:
        async with client() as (api, _):
            args = {
                "model": "fake",
                "input": "Hello",
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
            }
            whole = await api.responses.create(**args)
            logprobs = whole.output[0].content[0].logprobs
            assert "".join(token.token for token in logprobs[:6]) == "Answer"
            assert all(len(token.top_logprobs) == 2 for token in logprobs)
            async with api.responses.stream(**args) as stream:
                events = [event async for event in stream]
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            told = [token for event in deltas for token in event.logprobs]
            assert [token.logprob for token in told] == [token.logprob for token in logprobs]
            assert events[-1].response.output[0].content[0].logprobs == logprobs

    run(test())


def test_count_of_input_tokens() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            args = {"model": "fake", "input": "Hello", "instructions": "Be brief."}
            count = await api.responses.input_tokens.count(**args)
            assert not engine.seen
            answer = await api.responses.create(**args)
            assert count.input_tokens == answer.usage.input_tokens

    run(test())


def test_sync_client() -> None:
    async def test() -> None:
        async with serving() as server:

            def talk() -> None:
                with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key") as api:
                    assert api.responses.create(model="fake", input="Hi").output_text == reply(0)
                    with api.responses.stream(model="fake", input="Hi") as stream:
                        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
                        assert "".join(deltas) == reply(0)
                        assert stream.get_final_response().output_text == reply(0)

            await asyncio.to_thread(talk)

    run(test())


def test_errors_have_their_classes() -> None:
    async def test() -> None:
        async with client(api_key=["key"]) as (api, engine):
            create = api.responses.create
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model="fake", input="Hi", max_output_tokens=0)
            assert bad.value.param == "max_output_tokens"
            with pytest.raises(openai.NotFoundError) as unknown:
                await create(model="other", input="Hi")
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.InternalServerError):
                await create(model="fake", input="<fail>")
            async with api.responses.stream(model="fake", input="<fail>") as stream:
                events = [event async for event in stream]
            assert events[-1].type == "response.failed"
            assert events[-1].response.status == "failed"
            assert "engine failed" in events[-1].response.error.message
            engine.max_queued = 0
            with pytest.raises(openai.RateLimitError):
                await create(model="fake", input="Hi", stream=True)

    run(test())


def test_leaving_a_stream_aborts_and_keeps_nothing() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.step_seconds = 0.01
            async with api.responses.stream(model="fake", input="Hi") as stream:
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        name = stream._state._ResponseStreamState__current_snapshot.id
                        break
            await until(lambda: not engine.live)
            assert len(engine.aborted) == 1
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(name)

    run(test())
