"""/v1/chat/completions: shapes, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.server.inputs.call import SYSTEM_FINGERPRINT
from tests.server.fake_engine import MAX_MODEL_LEN, FakeEngine, reply
from tests.server.http_harness import CHAT, HELLO, run, serving
from tests.server.scripted import script


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": HELLO, **fields}


def test_whole_answer() -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.post(CHAT, chat())
        assert status == 200
        assert body.pop("id").startswith("chatcmpl-")
        assert isinstance(body.pop("created"), int)
        prompt = "<user>Hello<assistant>"
        num_out = len(reply(0).encode())
        assert body == {
            "object": "chat.completion",
            "model": "fake",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": reply(0),
                        "refusal": None,
                        "annotations": [],
                        "reasoning": None,
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": None,
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": num_out,
                "total_tokens": len(prompt) + num_out,
                "prompt_tokens_details": {"cached_tokens": 16},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            "service_tier": "default",
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
        }
        (request,) = server.engine.seen
        assert request.prompt == prompt
        assert request.token_ids == list(prompt.encode())  # no special tokens added
        assert request.params.max_tokens is None  # the rest of the context
        assert request.params.temperature == 0.5  # from the generation config

    run(test())


def test_an_answer_that_ends_by_length_ends_in_one_chunk() -> None:
    """A parsed answer too: the last text comes with the finish_reason, as in vLLM."""

    async def test() -> None:
        engine = FakeEngine()
        script(engine, "Well, well.")
        async with serving(engine) as server:
            for more in ({}, {"return_token_ids": True}):
                *_, last, done = await server.events(CHAT, chat(max_tokens=4, **more))
                assert done == "[DONE]"
                (choice,) = last["choices"]
                assert choice["delta"] == {"content": "l"}
                assert choice["finish_reason"] == "length"
                assert choice.get("token_ids", [108]) == [108]

    run(test())


def test_stream_chunk_by_chunk() -> None:
    async def test() -> None:
        async with serving() as server:
            events = await server.events(CHAT, chat(max_tokens=12))
        assert events.pop() == "[DONE]"
        keys = ("id", "object", "created", "model", "system_fingerprint")
        head = {key: events[0][key] for key in keys}
        assert head["object"] == "chat.completion.chunk"
        assert head["model"] == "fake"
        for event in events:
            assert {key: event[key] for key in head} == head
            assert set(event) == {*head, "choices"}
        choices = [event["choices"] for event in events]
        assert all(len(choice) == 1 for choice in choices)
        assert choices[0] == [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        assert choices[1][0]["delta"] == {"content": "A"}
        assert [choice[0]["finish_reason"] for choice in choices[:-1]] == [None] * 12
        assert choices[-1][0]["finish_reason"] == "length"
        text = "".join(choice[0]["delta"]["content"] for choice in choices)
        assert text == reply(0).encode()[:12].decode()

    run(test())


def test_half_a_character_is_a_chunk_without_text() -> None:
    """Clients count steps by their chunks; the text is whole."""

    async def test() -> None:
        async with serving() as server:
            events = await server.events(CHAT, chat())
        contents = [e["choices"][0]["delta"]["content"] for e in events[:-1]]
        assert len(contents) == 1 + len(reply(0).encode())
        assert [content for content in contents if content] == list(reply(0))
        assert contents[1 + reply(0).index("ü")] == ""

    run(test())


def test_stream_several_choices() -> None:
    async def test() -> None:
        async with serving() as server:
            events = await server.events(CHAT, chat(n=3))
        texts = ["", "", ""]
        roles, ends = [], []
        for event in events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["delta"]["content"]
            roles += [choice["index"]] * ("role" in choice["delta"])
            ends += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
        assert texts == [reply(0), reply(1), reply(2)]
        assert sorted(roles) == [0, 1, 2]
        assert ends == ["stop"] * 3

    run(test())


def test_stream_usage() -> None:
    async def test() -> None:
        async with serving() as server:
            plain = await server.events(CHAT, chat(max_tokens=3, stream_options={}))
            with_usage = await server.events(
                CHAT, chat(max_tokens=3, stream_options={"include_usage": True})
            )
            running = await server.events(
                CHAT,
                chat(
                    max_tokens=3,
                    stream_options={"include_usage": True, "continuous_usage_stats": True},
                ),
            )
        assert not any("usage" in event for event in plain[:-1])
        *chunks, usage, done = with_usage
        assert done == "[DONE]"
        assert not any("usage" in event for event in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert usage["usage"]["prompt_tokens"] == 22
        counts = [e["usage"]["completion_tokens"] for e in running[:-1]]
        assert counts == [0, 1, 2, 3, 3]

    run(test())


@pytest.mark.parametrize("is_parsed", [False, True])
def test_running_usage_of_an_echo(is_parsed: bool) -> None:
    async def test() -> None:
        engine = FakeEngine()
        if is_parsed:
            script(engine, "Well.")
        async with serving(engine) as server:
            last = {"role": "assistant", "content": "As I said"}
            options = {"include_usage": True, "continuous_usage_stats": True}
            events = await server.events(
                CHAT,
                chat(messages=[*HELLO, last], echo=True, max_tokens=2, stream_options=options),
            )
        role, echo, *_ = events
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert echo["choices"][0]["delta"]["content"] == "As I said"
        for event in (role, echo):
            assert event["usage"]["completion_tokens"] == 0
            assert event["usage"]["prompt_tokens"] == event["usage"]["total_tokens"] > 0

    run(test())


def test_logprobs() -> None:
    async def test() -> None:
        async with serving() as server:
            fields = chat(max_tokens=2, logprobs=True, top_logprobs=2)
            _, body = await server.post(CHAT, fields)
            events = await server.events(CHAT, fields)
            _, none_top = await server.post(CHAT, chat(max_tokens=1, logprobs=True))
        content = body["choices"][0]["logprobs"]["content"]
        assert content[0] == {  # "A" is 65, odd: not among the top two
            "token": "A",
            "logprob": -1.5,
            "bytes": [65],
            "top_logprobs": [
                {"token": "B", "logprob": -0.5, "bytes": [66]},
                {"token": "C", "logprob": -1.0, "bytes": [67]},
            ],
        }
        assert content[1]["token"] == "n"
        assert [top["token"] for top in content[1]["top_logprobs"]] == ["n", "A"]
        streamed = [e["choices"][0]["logprobs"] for e in events[1:-1]]
        assert [entry for part in streamed for entry in part["content"]] == content
        assert none_top["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    run(test())


def test_prompt_logprobs_and_token_ids_as_names() -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.post(
                CHAT,
                chat(
                    max_tokens=1,
                    prompt_logprobs=0,
                    logprobs=True,
                    return_tokens_as_token_ids=True,
                ),
            )
        assert status == 200
        assert body["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:65"
        assert body["prompt_logprobs"][0] is None
        assert body["prompt_logprobs"][1] == {
            "117": {"logprob": -0.5, "rank": 1, "decoded_token": "token_id:117"}
        }

    run(test())


def test_parameters_reach_the_engine() -> None:
    async def test() -> None:
        async with serving() as server:
            sampling = {
                "n": 2,
                "temperature": 0,
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
                "repetition_penalty": 1.1,
                "seed": 7,
                "stop": "x",
                "stop_token_ids": [3],
                "bad_words": ["no"],
                "ignore_eos": True,
                "min_tokens": 1,
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
                "truncate_prompt_tokens": 99,
                "logit_bias": {"65": 1.5},
                "allowed_token_ids": [65, 66],
            }
            await server.post(CHAT, chat(**sampling, max_completion_tokens=4, priority=3,
                                         cache_salt="mine"))  # fmt: skip
            await server.post(CHAT, chat(temperature=None, max_tokens=None, user="me", store=True))
        first, second = server.engine.seen
        for name, value in sampling.items():
            expected = {"stop": ["x"], "logit_bias": {65: 1.5}}.get(name, value)
            assert getattr(first.params, name) == expected, name
        assert first.params.max_tokens == 4
        assert (first.priority, first.cache_salt) == (3, "mine")
        assert second.params.temperature == 0.5
        assert second.max_tokens == MAX_MODEL_LEN - 22

    run(test())


def test_template_arguments() -> None:
    async def test() -> None:
        kwargs = {"default_chat_template_kwargs": {"lang": "en", "enable_thinking": True}}
        async with serving(**kwargs) as server:
            bodies: list[dict[str, Any]] = [
                {
                    "chat_template_kwargs": {"enable_thinking": False},
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                    "tool_choice": "none",
                },
                {"reasoning_effort": "none"},
                {"reasoning_effort": "low", "chat_template_kwargs": {"lang": "de"}},
                {"add_generation_prompt": False},
                {"continue_final_message": True},
            ]
            for body in bodies:
                assert (await server.post(CHAT, chat(max_tokens=1, **body)))[0] == 200
        assert [request.prompt for request in server.engine.seen] == [
            "<user>Hello{1 tools}[lang=en][enable_thinking=False]<assistant>",
            "<user>Hello[lang=en][enable_thinking=False][reasoning_effort=none]<assistant>",
            "<user>Hello[lang=de][enable_thinking=True][reasoning_effort=low]<assistant>",
            "<user>Hello[lang=en][enable_thinking=True]",
            "<user>Hello[lang=en][enable_thinking=True]",
        ]

    run(test())


def test_a_template_of_the_requests_own() -> None:
    async def test() -> None:
        async with serving(trust_request_chat_template=True) as server:
            body = chat(max_tokens=1, chat_template="{{ x }}", return_prompt_text=True)
            _, answer = await server.post(CHAT, body)
            first, *_ = await server.events(CHAT, body)
            status, _ = await server.post("/tokenize", {"messages": HELLO, "chat_template": "{{"})
        assert status == 200
        assert server.engine.seen[0].prompt == "<user>Hello({{ x }})<assistant>"
        assert answer["prompt_text"] == first["prompt_text"] == server.engine.seen[0].prompt

    run(test())


def test_no_tools_in_the_prompt_where_none_may_be_called() -> None:
    async def test() -> None:
        async with serving(exclude_tools_when_tool_choice_none=True) as server:
            tools = [{"type": "function", "function": {"name": "f"}}]
            await server.post(CHAT, chat(max_tokens=1, tools=tools, tool_choice="none"))
        assert server.engine.seen[0].prompt == "<user>Hello<assistant>"

    run(test())


def test_echo_and_roles() -> None:
    """The last message comes first, where it is one of the role that answers."""

    async def test() -> None:
        begun = [*HELLO, {"role": "assistant", "content": "So: "}]
        bodies = [
            chat(messages=begun, echo=True, continue_final_message=True, max_tokens=3),
            chat(messages=HELLO, echo=True, max_tokens=3),
            chat(messages=HELLO, echo=True, add_generation_prompt=False, max_tokens=3),
        ]
        expected = [("assistant", "So: Ans"), ("critic", "Ans"), ("user", "HelloAns")]
        async with serving(response_role="critic") as server:
            for body, (role, content) in zip(bodies, expected, strict=True):
                _, whole = await server.post(CHAT, body)
                message = whole["choices"][0]["message"]
                assert (message["role"], message["content"]) == (role, content)
                events = await server.events(CHAT, body)
                deltas = [event["choices"][0]["delta"] for event in events[:-1]]
                assert deltas[0] == {"role": role, "content": ""}
                assert "".join(delta["content"] for delta in deltas) == content
            _, scored = await server.post(CHAT, {**bodies[0], "logprobs": True})
        assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]

    run(test())


def test_flags_of_the_answer() -> None:
    async def test() -> None:
        flags = {"return_tokens_as_token_ids": True, "enable_prompt_tokens_details": False}
        async with serving(**flags) as server:
            _, body = await server.post(CHAT, chat(max_tokens=1, logprobs=True))
            own = chat(max_tokens=1, logprobs=True, return_tokens_as_token_ids=False)
            _, as_text = await server.post(CHAT, own)
            options = {"include_usage": True}
            *_, usage, _ = await server.events(CHAT, chat(max_tokens=1, stream_options=options))
        assert body["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:65"
        assert as_text["choices"][0]["logprobs"]["content"][0]["token"] == "A"
        assert body["usage"]["prompt_tokens_details"] is None
        assert usage["usage"]["prompt_tokens_details"] is None

    run(test())
