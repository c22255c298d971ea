"""Anthropic's own client, as its users write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.server.fake_engine import MAX_MODEL_LEN, FakeEngine, reply
from tests.server.http_harness import run, serving, until
from tests.server.scripted import NAMES, PARAMETERS, script

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"name": name, "description": "Ask.", "input_schema": PARAMETERS} for name in NAMES]


@asynccontextmanager
async def client(**args: object) -> AsyncIterator[tuple[AsyncAnthropic, FakeEngine]]:
    async with (
        serving(**args) as server,
        AsyncAnthropic(base_url=server.url, api_key="key", max_retries=0) as api,
    ):
        yield api, server.engine
        await server.quiet()


def test_message() -> None:
    async def test() -> None:
        async with client(api_key=["key"]) as (api, engine):
            answer = await api.messages.create(
                model="fake",
                max_tokens=100,
                system=[{"type": "text", "text": "Be brief."}],
                messages=HELLO,
                stop_sequences=["\n\n"],
                extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7},
            )
            assert answer.type == "message" and answer.role == "assistant"
            assert [(block.type, block.text) for block in answer.content] == [("text", reply(0))]
            assert answer.stop_reason == "end_turn" and answer.stop_sequence is None
            usage, params = answer.usage, engine.seen[0].params
            assert usage.input_tokens + usage.cache_read_input_tokens == len(
                engine.seen[0].token_ids
            )
            assert usage.cache_read_input_tokens > 0
            assert usage.output_tokens == len(reply(0).encode())
            assert answer._request_id.startswith("req_")
            assert (params.max_tokens, params.stop) == (100, ["\n\n"])
            assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
            assert engine.seen[0].prompt == (
                "<system>[{'type': 'text', 'text': 'Be brief.'}]"
                "<user>[{'type': 'text', 'text': 'Hello'}]<assistant>"
            )

    run(test())


def test_max_tokens() -> None:
    async def test() -> None:
        async with client() as (api, _):
            answer = await api.messages.create(model="fake", max_tokens=5, messages=HELLO)
            assert answer.content[0].text == reply(0)[:5]
            assert answer.stop_reason == "max_tokens"

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_the_context_has_no_room_for(stream: bool) -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.script = "x" * MAX_MODEL_LEN
            system = "y" * (MAX_MODEL_LEN - 150)
            args = {"model": "fake", "max_tokens": 20000, "messages": HELLO}
            args["system"] = [{"type": "text", "text": system}]
            if stream:
                async with api.messages.stream(**args) as events:
                    answer = await events.get_final_message()
            else:
                answer = await api.messages.create(**args)
            assert answer.stop_reason == "model_context_window_exceeded"
            usage = answer.usage
            prompt_tokens = usage.input_tokens + usage.cache_read_input_tokens
            assert prompt_tokens + usage.output_tokens == MAX_MODEL_LEN
            args["system"][0]["text"] = "y" * MAX_MODEL_LEN
            with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
                await api.messages.create(**args)

    run(test())


def test_stream() -> None:
    async def test() -> None:
        async with client() as (api, _):
            stream = await api.messages.create(
                model="fake", max_tokens=100, messages=HELLO, stream=True
            )
            events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[3:-3]) == {"content_block_delta"}
        assert events[0].message.content == [] and events[0].message.usage.input_tokens > 0
        assert events[-2].usage.output_tokens == len(reply(0).encode())

    run(test())


def test_stream_helper() -> None:
    """The accumulating helper of the client checks the shape and order of every event."""

    async def test() -> None:
        async with client() as (api, engine):
            script(engine)
            async with api.messages.stream(
                model="fake", max_tokens=500, messages=HELLO, tools=TOOLS
            ) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
            assert "{2 tools}" in engine.seen[0].prompt
        assert kinds.count("thinking") > 1 and kinds.count("signature") == 1
        thinking, text, weather, time = final.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Grün?")
        assert text.text == "I will ask."
        assert (weather.type, weather.name, weather.input) == (
            "tool_use",
            "weather",
            {"city": "Köln"},
        )
        assert (time.name, time.input) == ("time", {})
        assert weather.id != time.id
        assert final.stop_reason == "tool_use"

    run(test())


def test_whole_is_what_the_stream_adds_up_to() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            script(engine)
            args = {"model": "fake", "max_tokens": 500, "messages": HELLO, "tools": TOOLS}
            whole = await api.messages.create(**args)
            async with api.messages.stream(**args) as stream:
                streamed = await stream.get_final_message()
        left, right = (m.model_dump(exclude={"id", "parsed_output"}) for m in (whole, streamed))
        for block in (*left["content"], *right["content"]):
            block.pop("parsed_output", None)
            block.pop("id", None)  # of a call
        assert left == right

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_is_not_to_be_shown(stream: bool) -> None:
    async def test() -> None:
        async with client() as (api, engine):
            script(engine)
            thinking = {"type": "adaptive", "display": "omitted"}
            args = {"model": "fake", "max_tokens": 100, "messages": HELLO, "thinking": thinking}
            if stream:
                async with api.messages.stream(**args) as events:
                    answer = await events.get_final_message()
            else:
                answer = await api.messages.create(**args)
            assert (answer.content[0].type, answer.content[0].thinking) == ("thinking", "")

    run(test())


def test_count_tokens() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            count = await api.messages.count_tokens(
                model="fake", system="Be brief.", messages=HELLO, tools=TOOLS
            )
            assert not engine.seen
            await api.messages.create(
                model="fake", max_tokens=5, system="Be brief.", messages=HELLO, tools=TOOLS,
                tool_choice={"type": "none"},
            )  # fmt: skip
            assert count.input_tokens == len(engine.seen[0].token_ids)

    run(test())


def test_sync_client() -> None:
    async def test() -> None:
        async with serving() as server:

            def talk() -> None:
                with anthropic.Anthropic(base_url=server.url, api_key="key") as api:
                    args = {"model": "fake", "max_tokens": 100, "messages": HELLO}
                    assert api.messages.create(**args).content[0].text == reply(0)
                    with api.messages.stream(**args) as stream:
                        assert "".join(stream.text_stream) == reply(0)

            await asyncio.to_thread(talk)

    run(test())


def test_errors_have_their_classes() -> None:
    async def test() -> None:
        async with client(api_key=["key"]) as (api, engine):

            async def failing(wanted: type[anthropic.APIStatusError], **fields: object) -> str:
                args = {"model": "fake", "max_tokens": 5, "messages": HELLO, **fields}
                with pytest.raises(wanted) as caught:
                    await api.messages.create(**args)
                assert caught.value.request_id == caught.value.body["request_id"]
                assert caught.value.request_id.startswith("req_")
                return f"{caught.value.type}: {caught.value.api_message}"

            found = await failing(anthropic.BadRequestError, max_tokens=0)
            assert found.startswith("invalid_request_error: max_tokens")
            found = await failing(anthropic.BadRequestError, stop_sequences=[""])
            assert found.startswith("invalid_request_error: stop_sequences must")
            assert (await failing(anthropic.NotFoundError, model="x")).startswith("not_found_error")
            api.api_key = "wrong"
            assert (await failing(anthropic.AuthenticationError)).startswith("authentication_error")
            api.api_key = "key"
            body = "x" * (4 * 1024 * 1024)
            found = await failing(anthropic.ContentTooLargeError, system=body)
            assert found.startswith("request_too_large")
            found = await failing(anthropic.InternalServerError, system="<fail>")
            assert found.startswith("api_error")
            engine.max_queued = 0
            assert (await failing(anthropic.RateLimitError)).startswith("rate_limit_error")

    run(test())


def test_error_in_a_stream() -> None:
    async def test() -> None:
        async with client() as (api, _):
            stream = await api.messages.create(
                model="fake", max_tokens=100, system="<fail>", messages=HELLO, stream=True
            )
            with pytest.raises(anthropic.APIStatusError, match="engine failed") as caught:
                async for _event in stream:
                    pass
            assert caught.value.type == "api_error"

    run(test())


def test_leaving_a_stream_aborts() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.step_seconds = 0.01
            async with api.messages.stream(model="fake", max_tokens=100, messages=HELLO) as stream:
                async for text in stream.text_stream:
                    if text:
                        break
            await until(lambda: not engine.live)
            assert len(engine.aborted) == 1

    run(test())
