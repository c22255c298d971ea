"""Token ids, named logprobs and repetition detection over the wire, from the real engine."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine
from tests.server.http_harness import CHAT, COMPLETIONS, Server, run, serving

ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": 200,
    "swap_space": 0,
    "max_model_len": 256,
    "enable_prefix_caching": False,  # logprobs of the same question twice are the same floats
    "device": "cpu",
}
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]


@asynccontextmanager
async def tiny(**more: Any) -> AsyncIterator[Server]:
    engine: Any = AsyncLLMEngine("tiny", **ENGINE, **more)
    async with serving(engine) as server:
        yield server


def encoded(server: Server, text: str) -> list[int]:
    ids: list[int] = server.engine.tokenizer.encode(text)
    return ids


async def good(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await server.post(path, {"temperature": 0, **body})
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def test_token_ids_of_a_completion() -> None:
    async def test() -> None:
        async with tiny() as server:
            body = {"prompt": [PROMPT, "The"], "n": 2, "max_tokens": 6, "return_token_ids": True}
            choices = (await good(server, COMPLETIONS, body))["choices"]
            decode = server.engine.tokenizer.decode
            for choice in choices:
                prompt = PROMPT if choice["index"] < 2 else "The"
                assert choice["prompt_token_ids"] == encoded(server, prompt)
                assert len(choice["token_ids"]) == 6
                shown = decode([*choice["prompt_token_ids"], *choice["token_ids"]])
                assert shown.endswith(choice["text"])
            plain = await good(server, COMPLETIONS, body | {"return_token_ids": False})
            assert plain["choices"][0]["token_ids"] is None
            events = await server.events(COMPLETIONS, {"temperature": 0, **body})
            for choice in choices:
                own = [e["choices"][0] for e in events[:-1]]
                own = [c for c in own if c["index"] == choice["index"]]
                assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
                assert not any("prompt_token_ids" in c for c in own[1:])
                assert [i for c in own for i in c["token_ids"]] == choice["token_ids"]
                assert "".join(c["text"] for c in own) == choice["text"]
                assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"

    run(test())


def test_token_ids_of_a_chat() -> None:
    async def test() -> None:
        async with tiny() as server:
            body = {"messages": MESSAGES, "max_tokens": 8, "return_token_ids": True}
            whole = await good(server, CHAT, body)
            prompt = server.engine.tokenizer.render_chat(MESSAGES)
            ids = server.engine.tokenizer.encode(prompt, add_special_tokens=False)
            assert whole["prompt_token_ids"] == ids
            choice = whole["choices"][0]
            assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
            events = await server.events(CHAT, {"temperature": 0, **body})
            assert events[0]["prompt_token_ids"] == ids
            assert not any("prompt_token_ids" in event for event in events[1:-1])
            parts = [event["choices"][0] for event in events[:-1]]
            assert [i for part in parts for i in part.get("token_ids", ())] == choice["token_ids"]
            text = "".join(part["delta"].get("content") or "" for part in parts)
            assert text == choice["message"]["content"]

    run(test())


def test_echo_comes_with_the_ids_of_both_parts() -> None:
    async def test() -> None:
        async with tiny() as server:
            body = {"prompt": PROMPT, "echo": True, "return_token_ids": True}
            scored = await good(server, COMPLETIONS, {**body, "max_tokens": 0, "logprobs": 1})
            choice = scored["choices"][0]
            ids = encoded(server, PROMPT)
            assert (choice["text"], choice["token_ids"]) == (PROMPT, [])
            assert choice["prompt_token_ids"] == ids
            assert len(choice["logprobs"]["tokens"]) == len(ids)
            events = await server.events(COMPLETIONS, {**body, "max_tokens": 0})
            assert "".join(e["choices"][0]["text"] for e in events[:-1]) == PROMPT
            assert not any(e["choices"][0]["token_ids"] for e in events[:-1])
            both = (await good(server, COMPLETIONS, {**body, "max_tokens": 3}))["choices"][0]
            assert both["text"].startswith(PROMPT) and len(both["token_ids"]) == 3

    run(test())


def test_logprobs_of_named_tokens() -> None:
    async def test() -> None:
        async with tiny() as server:
            named = [7, 300, 7, 40]
            fields = {"max_tokens": 4, "logprob_token_ids": named}
            legacy = {"prompt": PROMPT, "logprobs": 2, "return_tokens_as_token_ids": True}
            choice = (await good(server, COMPLETIONS, legacy | fields))["choices"][0]
            top = choice["logprobs"]["top_logprobs"]
            for sampled, position in zip(choice["logprobs"]["tokens"], top, strict=True):
                assert list(position) == list(
                    dict.fromkeys([sampled, "token_id:7", "token_id:300", "token_id:40"])
                )
            chat = {"messages": MESSAGES, "logprobs": True, "return_tokens_as_token_ids": True}
            whole = (await good(server, CHAT, chat | fields))["choices"][0]["logprobs"]["content"]
            for entry in whole:
                names = [other["token"] for other in entry["top_logprobs"]]
                assert names[0] == entry["token"]
                assert names[-3:] == ["token_id:7", "token_id:300", "token_id:40"]
            events = await server.events(CHAT, {"temperature": 0, **chat, **fields})
            streamed = [e["choices"][0]["logprobs"] for e in events[:-1]]
            assert [entry for part in streamed if part for entry in part["content"]] == whole

    run(test())


def test_an_answer_that_repeats_itself_ends() -> None:
    async def test() -> None:
        async with tiny() as server:
            token_id = encoded(server, "x")[-1]
            body = {
                "prompt": PROMPT,
                "max_tokens": 20,
                "allowed_token_ids": [token_id],
                "repetition_detection": {"max_pattern_size": 2, "min_count": 4},
                "return_token_ids": True,
            }
            choice = (await good(server, COMPLETIONS, body))["choices"][0]
            assert choice["token_ids"] == [token_id] * 4
            assert (choice["finish_reason"], choice["stop_reason"]) == (
                "stop",
                "repetition_detected",
            )
            assert choice["text"] == server.engine.tokenizer.token_text(token_id) * 4
            events = await server.events(COMPLETIONS, {"temperature": 0, **body})
            assert "".join(e["choices"][0]["text"] for e in events[:-1]) == choice["text"]
            assert events[-2]["choices"][0]["stop_reason"] == "repetition_detected"

    run(test())


@pytest.mark.slow
def test_a_chat_thinks_no_longer_than_its_budget() -> None:
    async def test() -> None:
        async with tiny() as server:
            body = {
                "messages": MESSAGES,
                "max_tokens": 40,
                "chat_template_kwargs": {"enable_thinking": True},
            }
            free = (await good(server, CHAT, body))["choices"][0]["message"]
            body["thinking_token_budget"] = 3
            cut = (await good(server, CHAT, body))["choices"][0]["message"]
            assert cut["content"] and free["reasoning"].startswith(cut["reasoning"])
            num_tokens = len(server.engine.tokenizer.encode(cut["reasoning"], False))
            assert 0 < num_tokens <= 3 < len(server.engine.tokenizer.encode(free["reasoning"]))
            events = await server.events(CHAT, {"temperature": 0, **body})
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            for part in ("reasoning", "content"):
                assert "".join(delta.get(part) or "" for delta in deltas) == cut[part]

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (
            COMPLETIONS,
            {"logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0},
            "logprob_token_ids",
        ),
        (CHAT, {"logprobs": True, "logprob_token_ids": []}, "logprob_token_ids"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        (CHAT, {"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        (CHAT, {"repetition_detection": {"size": 3}}, "repetition_detection"),
        (CHAT, {"repetition_detection": 3}, "repetition_detection"),
        (CHAT, {"logit_bias": {"1_0": 1}}, "logit_bias"),
        (CHAT, {"return_token_ids": 2}, "return_token_ids"),
    ],
)
def test_bad_fields_are_named(path: str, fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with tiny() as server:
            prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
            status, answer = await server.post(path, {**prompt, **fields})
            assert status == 400, answer
            assert isinstance(answer, dict) and answer["error"]["param"] == param, answer

    run(test())


@pytest.mark.slow
def test_minus_one_reports_the_whole_vocabulary() -> None:
    async def test() -> None:
        async with tiny(max_logprobs=-1) as server:
            vocab_size = server.engine.config.model.vocab_size
            body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "prompt_logprobs": -1}
            whole = await good(server, CHAT, body | {"top_logprobs": -1})
            for position in whole["choices"][0]["logprobs"]["content"]:
                assert len(position["top_logprobs"]) == vocab_size
                known = [entry["logprob"] for entry in position["top_logprobs"]]
                assert known == sorted(known, reverse=True)
                assert sum(map(math.exp, known)) == pytest.approx(1, abs=1e-3)
            assert [len(of or ()) for of in whole["prompt_logprobs"][:2]] == [0, vocab_size]
            body = {"prompt": PROMPT, "max_tokens": 1, "logprobs": -1, "echo": True}
            (choice,) = (await good(server, COMPLETIONS, body))["choices"]
            assert len(choice["logprobs"]["top_logprobs"][-1]) >= vocab_size - 300  # one text twice
            body = {"token_ids": [72], "sampling_params": {"logprobs": -1, "max_tokens": 1}}
            (choice,) = (await good(server, "/inference/v1/generate", body))["choices"]
            assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == vocab_size

    run(test())


def test_minus_one_needs_room_for_all() -> None:
    async def test() -> None:
        async with tiny() as server:
            body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": -1}
            status, answer = await server.post(CHAT, body)
            assert status == 400 and answer["error"]["param"] == "top_logprobs"
            assert "at most 20 (-1 asks for 4096), got 4096" in answer["error"]["message"]

    run(test())
