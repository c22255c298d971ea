"""POST /v1/chat/completions/batch."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from asyncllm import AsyncLLMEngine
from asyncllm.server.chat import batch
from tests.server.fake_engine import reply
from tests.server.http_harness import CHAT, HELLO, run, serving, until

BATCH = "/v1/chat/completions/batch"
BYE = [{"role": "user", "content": "Bye"}]


def test_one_choice_for_each_conversation() -> None:
    async def test() -> None:
        async with serving() as server:
            body = {"messages": [HELLO, BYE, HELLO], "max_tokens": 5, "seed": 3, "logprobs": True}
            status, answer = await server.post(BATCH, body)
            seen = server.engine.seen
        assert status == 200, answer
        assert answer["object"] == "chat.completion"
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        for choice in answer["choices"]:
            assert choice["message"]["content"] == reply(0)[:5]
            assert len(choice["logprobs"]["content"]) == 5
        assert answer["usage"]["completion_tokens"] == 15
        assert answer["usage"]["prompt_tokens"] == sum(len(one.token_ids) for one in seen)
        assert [b"Bye" in bytes(one.token_ids) for one in seen] == [False, True, False]
        assert all(one.params.seed == 3 for one in seen)

    run(test())


@pytest.mark.slow
def test_each_is_answered_as_if_alone() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine(
            "tiny", num_gpu_blocks_override=400, swap_space=0, device="cpu"
        )
        async with serving(engine) as server:
            texts = [f"What is {i} + {i}?" for i in range(6)]
            chats = [[{"role": "user", "content": text}] for text in texts]
            params = {"seed": 7, "max_tokens": 12, "return_token_ids": True}
            _, whole = await server.post(BATCH, {"messages": chats, **params})
            prompt_tokens = 0
            for choice, chat in zip(whole["choices"], chats, strict=True):
                _, alone = await server.post(CHAT, {"messages": chat, **params})
                assert choice["message"] == alone["choices"][0]["message"]
                assert choice["token_ids"] == alone["choices"][0]["token_ids"]
                assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
                prompt_tokens += alone["usage"]["prompt_tokens"]
            assert whole["usage"]["prompt_tokens"] == prompt_tokens
            assert "prompt_token_ids" not in whole

    run(test())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO}, "messages"),
        ({"messages": [HELLO, []]}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_refused(changes: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            status, answer = await server.post(BATCH, {"messages": [HELLO], **changes})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert not server.engine.seen

    run(test())


def test_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_CONVERSATIONS", 3)

    async def test() -> None:
        async with serving() as server:
            assert (await server.post(BATCH, {"messages": [HELLO] * 3}))[0] == 200
            status, answer = await server.post(BATCH, {"messages": [HELLO] * 4})
            assert (status, answer["error"]["param"]) == (400, "messages")
            status, answer = await server.post(BATCH, {"messages": [HELLO] * 2, "best_of": 2})
            assert (status, answer["error"]["param"]) == (400, "best_of")

    run(test())


def test_one_that_fails_fails_the_call_and_leaving_ends_them_all() -> None:
    async def test() -> None:
        async with serving() as server:
            failing = [{"role": "user", "content": "<fail>"}]
            assert (await server.post(BATCH, {"messages": [HELLO, failing]}))[0] == 500
            await server.quiet()
            server.engine.go.clear()
            async with aiohttp.ClientSession() as leaver:
                task = asyncio.create_task(
                    leaver.post(server.url + BATCH, json={"messages": [HELLO, BYE]})
                )
                await until(lambda: len(server.engine.live) == 2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not server.engine.live)

    run(test())
