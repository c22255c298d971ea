"""Responses in the background, by OpenAI's own client: polled, cancelled, streamed and resumed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from asyncllm.server.http.errors import ApiError
from asyncllm.server.responses.background import Background
from tests.responses.test_client import client
from tests.server.fake_engine import FakeEngine, reply
from tests.server.http_harness import run, serving, until

ASKED: dict[str, Any] = {"model": "fake", "input": "Hello", "background": True}


async def ended(api: AsyncOpenAI, name: str) -> Any:
    for _ in range(1000):
        if (answer := await api.responses.retrieve(name)).status != "in_progress":
            return answer
        await asyncio.sleep(0.01)
    pytest.fail("it has not ended")


def hold_after(engine: FakeEngine, num_steps: int) -> None:
    """The engine stops once an answer has so many tokens, until `go` is set."""

    def inflate(text: str) -> str:
        if engine.seen[-1].num_steps == num_steps:
            engine.go.clear()
        return text

    engine.chunk_text = inflate


def test_polled_to_its_end() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.go.clear()
            asked = await api.responses.create(**ASKED, metadata={"a": "b"})
            assert asked.status == "queued" and asked.background and asked.output == []
            running = await api.responses.retrieve(asked.id)
            assert running.status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="not ended"):
                await api.responses.create(model="fake", input="x", previous_response_id=asked.id)
            engine.go.set()
            answer = await ended(api, asked.id)
            assert answer.status == "completed" and answer.output_text == reply(0)
            assert answer.metadata == {"a": "b"} and answer.usage.output_tokens > 0
            assert (await api.responses.cancel(answer.id)) == answer
            after = await api.responses.create(
                model="fake", input="And?", previous_response_id=answer.id
            )
            assert after.status == "completed" and reply(0) in engine.seen[-1].prompt

    run(test())


def test_a_client_that_leaves_loses_nothing() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.go.clear()
            asked = await api.responses.create(**ASKED)
            await api.close()
            async with AsyncOpenAI(base_url=api.base_url, api_key="key") as other:
                engine.go.set()
                assert (await ended(other, asked.id)).output_text == reply(0)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled(stream: bool) -> None:
    async def test() -> None:
        async with client() as (api, engine):
            hold_after(engine, 9)
            asked: Any = await api.responses.create(**ASKED, stream=stream)
            name = (await anext(asked)).response.id if stream else asked.id
            await until(lambda: not engine.go.is_set())
            cancelled = await api.responses.cancel(name)
            assert cancelled.status == "cancelled" and not engine.live
            assert cancelled.output_text and reply(0).startswith(cancelled.output_text)
            assert cancelled.output[-1].status == "incomplete"
            assert await api.responses.cancel(name) == cancelled
            assert await api.responses.retrieve(name) == cancelled
            if stream:
                assert {event.type async for event in asked} >= {"response.output_text.delta"}

    run(test())


def test_one_that_has_not_begun_is_cancelled_and_deleted() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            engine.go.clear()
            first, second = [await api.responses.create(**ASKED) for _ in range(2)]
            assert (await api.responses.cancel(first.id)).output == []
            await api.responses.delete(second.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(second.id)
            assert not engine.live

    run(test())


def test_streamed_and_resumed() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            hold_after(engine, 9)
            stream = await api.responses.create(**ASKED, stream=True)
            seen = [await anext(stream) for _ in range(6)]
            kinds = [event.type.removeprefix("response.") for event in seen[:3]]
            assert kinds == ["created", "queued", "in_progress"]
            name = seen[0].response.id
            await stream.close()
            await until(lambda: not engine.go.is_set())
            engine.go.set()
            resumed = await api.responses.retrieve(
                name, stream=True, starting_after=seen[-1].sequence_number
            )
            seen += [event async for event in resumed]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            assert seen[-1].type == "response.completed"
            assert seen[-1].response.output_text == reply(0)
            again = await api.responses.retrieve(name, stream=True)
            assert [event async for event in again] == seen
            last = await api.responses.retrieve(name, stream=True, starting_after=len(seen) - 2)
            assert [event.type async for event in last] == ["response.completed"]

    run(test())


def test_another_key_finds_nothing() -> None:
    async def test() -> None:
        async with client(api_key=["key", "other"]) as (api, engine):
            engine.go.clear()
            asked = await api.responses.create(**ASKED)
            other = api.with_options(api_key="other")
            for refused in (
                other.responses.cancel(asked.id),
                other.responses.retrieve(asked.id),
                other.responses.delete(asked.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await refused
            engine.go.set()
            assert (await ended(api, asked.id)).status == "completed"

    run(test())


def test_what_fails_is_said_where_it_can_be() -> None:
    async def test() -> None:
        async with client() as (api, engine):
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await api.responses.create(**ASKED, max_output_tokens=10_000)
            assert not engine.seen
            asked = await api.responses.create(**ASKED | {"input": "<fail>"})
            failed = await ended(api, asked.id)
            assert failed.status == "failed" and failed.error.code == "server_error"
            assert failed.output_text and reply(0).startswith(failed.output_text)
            stream = await api.responses.create(**ASKED | {"input": "<fail>"}, stream=True)
            events = [event async for event in stream]
            assert events[-1].type == "response.failed"
            name = events[0].response.id
            assert (await api.responses.retrieve(name)).status == "failed"

    run(test())


@pytest.mark.parametrize(
    ("query", "param"),
    [("stream=true", "stream"), ("stream=true&starting_after=x", "starting_after")],
)
def test_refused_streams(query: str, param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            body = {"input": "Hi", "background": True, "stream": param != "stream"}
            if param == "stream":
                _, answer = await server.post("/v1/responses", body)
                name = answer["id"]
            else:
                name = (await server.named_events("/v1/responses", body))[0]["response"]["id"]
            status, answer = await server.get(f"/v1/responses/{name}?{query}")
            assert (status, answer["error"]["param"]) == (400, param)
            await server.quiet()

    run(test())


def test_a_store_without_room_refuses() -> None:
    async def test() -> None:
        async with serving(responses_store_bytes=0) as server:
            status, answer = await server.post("/v1/responses", {"input": "x", "background": True})
            assert (status, answer["error"]["param"]) == (400, "background")
            assert not server.engine.seen

    run(test())


def test_the_oldest_events_make_room() -> None:
    async def test() -> None:
        async with serving(responses_store_bytes=30_000) as server:
            names = []
            for _ in range(4):
                body = {"input": "Hi", "background": True}
                events = await server.named_events("/v1/responses", body)
                assert events[-1]["type"] == "response.completed"
                names.append(events[0]["response"]["id"])
            codes = [(await server.get(f"/v1/responses/{name}?stream=true"))[0] for name in names]
            assert codes[0] == 400 and codes[-1] == 200
            assert (await server.get(f"/v1/responses/{names[0]}"))[0] == 200  # itself is kept

    run(test())


def test_what_still_runs_is_cancelled_when_the_app_closes() -> None:
    async def test() -> None:
        ends: list[str] = []

        async def work(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(name)

        background = Background(1000)
        for name in ("a", "b"):
            background.start(name, partial(work, name))
        await background.close()
        assert ends == ["a", "b"]

    run(test())


def test_the_shutdown_ends_it() -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.go.clear()
            _, asked = await server.post("/v1/responses", {"input": "Hi", "background": True})
            server.service.fail_live(ApiError(503, "the server is shutting down"))
            await server.quiet()
            _, answer = await server.get(f"/v1/responses/{asked['id']}")
            assert answer["status"] == "failed" and "shutting down" in answer["error"]["message"]

    run(test())
