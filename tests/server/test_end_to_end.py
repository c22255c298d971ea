"""The real engine with the built-in model on the CPU, through the official client and the shell."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from asyncllm import AsyncLLMEngine
from tests.engine.test_async_engine import set_queue_clock_forward
from tests.server.http_harness import Server, run, serving
from tests.server.process import MODEL, served
from tests.waiting import PATIENCE_SECONDS, until

ENGINE = {"num_gpu_blocks_override": 400, "swap_space": 0, "max_model_len": 512, "device": "cpu"}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@asynccontextmanager
async def client(**engine_args: Any) -> AsyncIterator[tuple[AsyncOpenAI, Server]]:
    """Everything that a request owned is free again when the block ends."""
    engine: Any = AsyncLLMEngine(MODEL, **{**ENGINE, **engine_args})
    async with (
        serving(engine) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, server
        await until(lambda: not server.service.num_live and not engine.stats().num_running)
        engine.check_integrity()
        engine.check_idle()
        assert engine.stats().num_used_pages == 0


async def streamed(api: AsyncOpenAI, **fields: Any) -> str:
    stream = await api.chat.completions.create(model=MODEL, stream=True, **fields)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def whole(api: AsyncOpenAI, **fields: Any) -> str:
    answer = await api.chat.completions.create(model=MODEL, **fields)
    return answer.choices[0].message.content or ""


@pytest.mark.slow
def test_stream_equals_whole() -> None:
    async def test() -> None:
        async with client() as (api, _):
            for fields in (
                {"temperature": 0},
                {"seed": 7},
                {"temperature": 0, "stop": "2"},
                {"seed": 3, "n": 1, "max_tokens": 5, "logit_bias": {"300": 5}},
            ):
                fields = {"max_tokens": 16, **fields}
                one = await streamed(api, messages=QUESTION, **fields)
                assert one == await whole(api, messages=QUESTION, **fields)
                assert one or "stop" in fields

    run(test())


@pytest.mark.slow
def test_64_streams_at_once() -> None:
    """Each gets what it would get alone, whoever else is served."""

    async def test() -> None:
        async with client(max_num_seqs=24) as (api, _):
            questions = [[{"role": "user", "content": f"What is {i} + 4?"}] for i in range(64)]
            answers = await asyncio.gather(
                *(streamed(api, messages=q, seed=i, max_tokens=12) for i, q in enumerate(questions))
            )
            assert all(answers)
            for i in (0, 31, 63):
                alone = await whole(api, messages=questions[i], seed=i, max_tokens=12)
                assert alone == answers[i]

    run(test())


def test_completions() -> None:
    async def test() -> None:
        async with client() as (api, server):
            _, prompt = await server.post("/tokenize", {"messages": QUESTION})
            fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
            by_ids = await api.completions.create(
                prompt=prompt["tokens"], echo=True, logprobs=2, n=2, **fields
            )
            first, second = by_ids.choices
            assert first.text == second.text
            assert "12 + 30" in first.text
            assert len(first.logprobs.tokens) == prompt["count"] + 6
            assert first.logprobs.token_logprobs[0] is None
            assert all(p <= 0 for p in first.logprobs.token_logprobs[1:])
            assert by_ids.usage.prompt_tokens == prompt["count"]
            stream = await api.completions.create(
                prompt=[prompt["tokens"], prompt["tokens"][:3]], stream=True, **fields
            )
            texts = ["", ""]
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert first.text.endswith(texts[0])
            assert texts[1]
            _, text = await server.post("/detokenize", {"tokens": prompt["tokens"]})
            assert "12 + 30" in text["prompt"]

    run(test())


def test_chat_logprobs() -> None:
    async def test() -> None:
        async with client() as (api, _):
            answer = await api.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
            )
            choice = answer.choices[0]
            content = choice.logprobs.content
            for token in content:
                assert len(token.top_logprobs) == 3
                assert token.top_logprobs[0].token == token.token  # greedy: the likeliest
            text = b"".join(bytes(token.bytes) for token in content).decode()
            assert text.startswith(choice.message.content)

    run(test())


def test_usage_counts_cached_tokens() -> None:
    async def test() -> None:
        async with client() as (api, _):
            long = [{"role": "user", "content": "Count with me: 1 2 3 4 5 6 7 8 9 10 " * 4}]
            for _ in range(2):
                answer = await api.chat.completions.create(model=MODEL, messages=long, max_tokens=2)
            assert answer.usage.prompt_tokens_details.cached_tokens >= 16

    run(test())


def test_refusals() -> None:
    async def test() -> None:
        async with client(max_queued_requests=1) as (api, server):
            create = api.chat.completions.create
            for fields, param in (
                ({"max_tokens": 10_000}, "max_tokens"),
                ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
                ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
                ({"logit_bias": {"9999999": 1}}, "logit_bias"),
                ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
                ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
                ({"messages": [{"content": "no role"}]}, "messages"),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    await create(**{"model": MODEL, "messages": QUESTION, **fields})
                assert refused.value.param == param
            with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
                await api.completions.create(model=MODEL, prompt=[5] * 600)
            status, body = await server.post("/v1/completions", {"prompt": [5] * 600})
            assert (status, body["error"]["param"]) == (400, "prompt")
            assert body["error"]["code"] == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as refused:
                await api.completions.create(model=MODEL, prompt=[10**7])
            assert refused.value.param == "prompt"

    run(test())


@pytest.mark.slow
def test_overload_is_429() -> None:
    async def test() -> None:
        async with client(max_queued_requests=2, max_num_seqs=1) as (api, _):
            fields: dict[str, Any] = {"messages": QUESTION, "max_tokens": 60}
            fields["extra_body"] = {"ignore_eos": True}
            results = await asyncio.gather(
                *(whole(api, **fields) for _ in range(12)), return_exceptions=True
            )
            refused = [r for r in results if isinstance(r, openai.RateLimitError)]
            assert refused
            assert len(refused) + sum(isinstance(r, str) for r in results) == 12

    run(test())


@pytest.mark.slow
def test_waiting_too_long_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with client(max_queue_seconds=300, max_num_seqs=1) as (api, server):
            body = {"prompt": "Once", "max_tokens": 250, "ignore_eos": True}
            running = asyncio.create_task(server.post("/v1/completions", body))
            await until(lambda: server.engine.stats().num_running == 1)
            waiting = asyncio.create_task(whole(api, messages=QUESTION))
            await until(lambda: server.engine.stats().num_waiting == 1)
            set_queue_clock_forward(monkeypatch, 301)
            with pytest.raises(openai.InternalServerError) as refused:
                await waiting
            assert refused.value.status_code == 503
            assert refused.value.response.headers["Retry-After"] == "1"
            assert (await running)[0] == 200

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(stream: bool) -> None:
    async def test() -> None:
        async with client() as (_, server):
            body = {"prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": stream}
            async with aiohttp.ClientSession() as session:
                task = asyncio.create_task(
                    session.post(server.url + "/v1/completions", json={**body, "n": 3})
                )
                await until(lambda: server.engine.stats().num_used_pages > 6)
                task.cancel()
                if stream and not task.cancelled():
                    await asyncio.gather(task, return_exceptions=True)
            await until(lambda: server.engine.stats().num_used_pages == 0)
            assert server.engine.recorder.finished == {"abort": 1}

    run(test())


def test_engine_that_closes_ends_its_streams() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine(MODEL, **ENGINE)
        async with serving(engine) as server:
            body = {"prompt": "Once", "max_tokens": 450, "ignore_eos": True}
            events = asyncio.create_task(server.events("/v1/completions", body))
            await until(lambda: engine.stats().num_running)
            await engine.aclose()
            assert set((await events)[-1]) == {"error"}
            assert (await server.get("/health"))[0] == 503
            assert (await server.post("/v1/completions", body))[0] == 503
            assert (await server.get("/metrics"))[0] in (200, 503)

    run(test())


def test_serve_and_stop() -> None:
    """A stream that runs when the signal comes is finished, then the exit code is 0."""
    with served("--served-model-name", "mine") as (process, url, said):
        assert "attention backend" in said
        assert re.search(r"seconds\s+imports \d.*, load \d.*, command_to_ready \d", said)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            stream = api.completions.create(
                model="mine",
                prompt="Once",
                max_tokens=60,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = []
            for chunk in stream:
                if not chunks:
                    process.send_signal(signal.SIGINT)
                chunks.append(chunk)
            assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_second_signal_leaves_at_once() -> None:
    with (
        served("--host", "localhost") as (process, url, _),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as late,
    ):
        stream = api.completions.create(
            model=MODEL,
            prompt="A",
            max_tokens=1500,
            n=20,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            while True:  # until the first signal was taken: then newcomers are refused
                late.completions.create(model=MODEL, prompt="A", max_tokens=1)
        with pytest.raises(urllib.error.HTTPError, match="503"):  # a new connection is told so
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 1  # 0: the answers had ended
