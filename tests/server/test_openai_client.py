"""The official client, as its users write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI

from tests.server.fake_engine import FakeEngine, reply
from tests.server.http_harness import run, serving, until

MESSAGES = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def client(**args: object) -> AsyncIterator[tuple[AsyncOpenAI, FakeEngine]]:
    async with (
        serving(**args) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as api,
    ):
        yield api, server.engine
        await server.quiet()


def test_chat() -> None:
    async def test() -> None:
        async with client(api_key=["key"]) as (api, _):
            answer = await api.chat.completions.create(
                model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2
            )
            assert [choice.message.content for choice in answer.choices] == [reply(0), reply(1)]
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "B"
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + (
                answer.usage.completion_tokens
            )
            assert answer.usage.prompt_tokens_details.cached_tokens == 16

    run(test())


def test_chat_stream() -> None:
    async def test() -> None:
        async with client() as (api, _):
            stream = await api.chat.completions.create(
                model="fake",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == reply(0)
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == len(reply(0).encode())

    run(test())


def test_stream_helper() -> None:
    """The accumulating helper of the client checks the shape of every chunk."""

    async def test() -> None:
        async with (
            client() as (api, _),
            api.chat.completions.stream(model="fake", messages=MESSAGES) as stream,
        ):
            async for _event in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == reply(0)

    run(test())


def test_completions() -> None:
    async def test() -> None:
        async with client() as (api, _):
            answer = await api.completions.create(
                model="fake", prompt=["a", "b"], n=2, max_tokens=5, logprobs=1, echo=True
            )
            assert [choice.text for choice in answer.choices] == [
                "aAnswe",
                "aAnswe",
                "bAnswe",
                "bAnswe",
            ]
            assert answer.choices[0].logprobs.tokens[-1] == "e"
            stream = await api.completions.create(
                model="fake", prompt="a", max_tokens=100, stream=True
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == reply(0)

    run(test())


def test_models() -> None:
    async def test() -> None:
        async with client() as (api, _):
            assert [model.id async for model in api.models.list()] == ["fake", "fake-alias"]
            assert (await api.models.retrieve("fake")).id == "fake"

    run(test())


def test_errors_have_their_classes() -> None:
    async def test() -> None:
        async with client(api_key=["key"]) as (api, engine):
            create = api.chat.completions.create
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model="fake", messages=MESSAGES, temperature=-1)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as unknown:
                await create(model="other", messages=MESSAGES)
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.AuthenticationError):
                await api.with_options(api_key="wrong").models.list()
            failing = [{"role": "user", "content": "<fail>"}]
            stream = await create(model="fake", messages=failing, stream=True)
            with pytest.raises(openai.APIError, match="engine failed"):
                async for _chunk in stream:
                    pass
            engine.max_queued = 0
            with pytest.raises(openai.RateLimitError):
                await create(model="fake", messages=MESSAGES)

    run(test())


def test_leaving_a_stream_aborts() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.step_seconds = 0.01
            stream = await api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await until(lambda: not engine.live)
            assert len(engine.aborted) == 1

    run(test())


@pytest.mark.slow
def test_many_streams_at_once() -> None:
    async def test() -> None:
        async with client() as (api, engine):

            async def one(i: int) -> str:
                stream = await api.chat.completions.create(
                    model="fake", messages=MESSAGES, stream=True, max_tokens=i + 1
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            texts = await asyncio.gather(*(one(i) for i in range(64)))
            for i, text in enumerate(texts):
                assert text == reply(0).encode()[: i + 1].decode("utf-8", "ignore")
            assert not engine.live

    run(test())
