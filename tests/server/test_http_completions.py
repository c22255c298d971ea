"""/v1/completions: prompts in every form, echo, logprobs, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import AsyncLLMEngine
from asyncllm.server.inputs.call import SYSTEM_FINGERPRINT
from tests.server.fake_engine import BOS, reply
from tests.server.http_harness import COMPLETIONS, HELLO, run, serving


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "Say", "max_tokens": 4, **fields}


def text(index: int, num_tokens: int = 4) -> str:
    return reply(index).encode()[:num_tokens].decode()


def test_whole_answer() -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.post(COMPLETIONS, completion())
            await server.post(COMPLETIONS, {"prompt": "Say"})
        assert status == 200
        assert body.pop("id").startswith("cmpl-")
        assert isinstance(body.pop("created"), int)
        assert body == {
            "object": "text_completion",
            "model": "fake",
            "choices": [
                {
                    "index": 0,
                    "text": "Answ",
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": None,
                    "token_ids": None,
                }
            ],
            "usage": {
                "prompt_tokens": 4,
                "completion_tokens": 4,
                "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "service_tier": None,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "kv_transfer_params": None,
        }
        assert server.engine.seen[1].params.max_tokens == 16  # OpenAI's default

    run(test())


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_prompt_forms(prompt: Any, token_ids: list[list[int]]) -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.post(COMPLETIONS, completion(prompt=prompt))
        assert status == 200
        assert [request.token_ids for request in server.engine.seen] == token_ids
        assert body["usage"]["prompt_tokens"] == sum(map(len, token_ids))

    run(test())


def test_several_prompts_and_n() -> None:
    """Choice i of prompt p has index p * n + i, streamed or not."""

    async def test() -> None:
        fields = completion(prompt=["a", "bb"], n=2, stream_options={"include_usage": True})
        async with serving() as server:
            events = await server.events(COMPLETIONS, fields)
            fields.pop("stream_options")
            _, body = await server.post(COMPLETIONS, fields)
        wanted = [text(0), text(1), text(0), text(1)]
        assert [choice["text"] for choice in body["choices"]] == wanted
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 2 + 3  # each prompt once
        assert body["usage"]["completion_tokens"] == 16
        texts = [""] * 4
        *chunks, usage, done = events
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == wanted
        assert usage["choices"] == []
        assert usage["usage"] == body["usage"]
        assert done == "[DONE]"

    run(test())


def test_stream_chunk_by_chunk() -> None:
    async def test() -> None:
        async with serving() as server:
            events = await server.events(COMPLETIONS, completion(max_tokens=2))
        assert events.pop() == "[DONE]"
        assert [event["object"] for event in events] == ["text_completion"] * 2
        assert events[0]["choices"] == [
            {"index": 0, "text": "A", "logprobs": None, "finish_reason": None}
        ]
        assert events[1]["choices"] == [
            {
                "index": 0,
                "text": "n",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ]

    run(test())


def test_the_prompts_ids_come_with_the_first_token() -> None:
    async def test() -> None:
        async with serving() as server:
            events = await server.events(COMPLETIONS, completion(return_token_ids=True, n=2))
            (echo, *_) = await server.events(
                COMPLETIONS, completion(return_token_ids=True, echo=True)
            )
        choices = [event["choices"][0] for event in events[:-1]]
        assert len(choices) == 2 * 4
        for choice in choices:
            is_first = choice["token_ids"] == [ord("A")]
            assert ("prompt_token_ids" in choice) == is_first
            assert choice.get("prompt_token_ids", [BOS, *b"Say"]) == [BOS, *b"Say"]
        assert echo["choices"][0]["prompt_token_ids"] == [BOS, *b"Say"]

    run(test())


def test_steps_without_text_are_told() -> None:
    """A client times tokens, not texts."""

    async def test() -> None:
        async with serving() as server:
            server.engine.chunk_text = lambda text: "" if text in "As" else text
            events = await server.events(COMPLETIONS, completion())
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["", "n", "", "w"]

    run(test())


def test_legacy_logprobs() -> None:
    async def test() -> None:
        async with serving() as server:
            _, body = await server.post(COMPLETIONS, completion(max_tokens=2, logprobs=1))
        assert body["choices"][0]["logprobs"] == {
            "text_offset": [0, 1],
            "token_logprobs": [-1.0, -0.5],
            "tokens": ["A", "n"],
            # One more than asked for where the token itself is not among them.
            "top_logprobs": [{"A": -1.0, "B": -0.5}, {"n": -0.5}],
        }

    run(test())


def test_echo_with_logprobs() -> None:
    async def test() -> None:
        fields = completion(prompt="hi", echo=True, logprobs=0, max_tokens=2)
        async with serving() as server:
            _, body = await server.post(COMPLETIONS, fields)
            events = await server.events(COMPLETIONS, fields)
        (choice,) = body["choices"]
        assert choice["text"] == "hiAn"
        assert choice["logprobs"]["tokens"] == ["\x01", "h", "i", "A", "n"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert choice["logprobs"]["top_logprobs"][0] is None
        streamed = [event["choices"][0] for event in events[:-1]]
        assert [part["text"] for part in streamed] == ["hi", "A", "n"]
        merged: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
        for part in streamed:
            for name, values in part["logprobs"].items():
                merged[name] += values
        assert merged == choice["logprobs"]

    run(test())


def test_echo_of_a_prompt_that_was_cut() -> None:
    """The text is that of the tokens that were kept, as the offsets say."""

    async def test() -> None:
        async with serving(AsyncLLMEngine("tiny", max_model_len=512, max_num_seqs=2)) as server:
            fields = {"prompt": "ab cd", "echo": True, "logprobs": 0, "max_tokens": 1}
            _, cut = await server.post(COMPLETIONS, {**fields, "truncate_prompt_tokens": 2})
            _, whole = await server.post(COMPLETIONS, {**fields, "truncate_prompt_tokens": -1})
        (cut_choice,), (whole_choice,) = cut["choices"], whole["choices"]
        assert whole_choice["text"].startswith("ab cd")
        assert cut_choice["text"].startswith(" cd")
        assert cut_choice["logprobs"]["tokens"][:2] == [" c", "d"]
        assert cut_choice["logprobs"]["text_offset"] == [0, 2, 3]

    run(test())


def test_echo_of_token_ids_and_scoring() -> None:
    """`max_tokens=0` with `echo` returns the prompt alone, as evaluation harnesses ask for it."""

    async def test() -> None:
        async with serving() as server:
            _, ids = await server.post(COMPLETIONS, completion(prompt=[104, 105], echo=True))
            fields = completion(prompt="hi", echo=True, max_tokens=0, logprobs=1)
            _, scored = await server.post(COMPLETIONS, fields)
            running = {"include_usage": True, "continuous_usage_stats": True}
            events = await server.events(COMPLETIONS, {**fields, "stream_options": running})
        assert ids["choices"][0]["text"] == "hi" + text(0)
        assert ids["usage"]["completion_tokens"] == 4
        assert scored["usage"]["completion_tokens"] == 0
        assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [0, 0, 0]
        (choice,) = scored["choices"]
        assert choice["text"] == "hi"
        assert choice["logprobs"]["tokens"] == ["\x01", "h", "i"]
        assert choice["finish_reason"] == "length"
        assert [event["choices"][0]["text"] for event in events[:-2]] == ["hi", ""]

    run(test())


def test_prompt_logprobs() -> None:
    async def test() -> None:
        async with serving() as server:
            _, body = await server.post(COMPLETIONS, completion(prompt=[66, 68], prompt_logprobs=1))
        assert body["choices"][0]["prompt_logprobs"] == [
            None,
            {"68": {"logprob": -0.5, "rank": 1, "decoded_token": "D"}},
        ]

    run(test())


def test_invocations_are_chats_or_completions() -> None:
    async def test() -> None:
        async with serving() as server:
            for body, kind in (
                ({"messages": HELLO, "max_tokens": 1}, "chat.completion"),
                ({"prompt": "a", "max_tokens": 1}, "text_completion"),
            ):
                status, answer = await server.post("/invocations", body)
                assert status == 200 and answer["object"] == kind
                events = await server.events("/invocations", body)
                assert events[-1] == "[DONE]"
            for bad in ({}, {"input": "a"}, [], "a"):
                status, error = await server.post("/invocations", bad)
                assert status == 400, error

    run(test())
