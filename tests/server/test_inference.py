"""POST /inference/v1/generate: token ids in and out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.server.inference import NOT_OVER_HTTP, SamplingFields
from tests.server.fake_engine import reply
from tests.server.http_harness import run, serving

GENERATE = "/inference/v1/generate"
ENGINE = {"num_gpu_blocks_override": 400, "swap_space": 0, "max_model_len": 512, "device": "cpu"}


def body(*ids: int, **params: Any) -> dict[str, Any]:
    return {"token_ids": list(ids or (72, 105)), "sampling_params": params}


def test_fields_are_those_of_sampling_params() -> None:
    python = {field.name for field in dataclasses.fields(SamplingParams)}
    over_http = set(SamplingFields.__struct_fields__)
    assert over_http == python - NOT_OVER_HTTP
    assert python > NOT_OVER_HTTP


def test_whole() -> None:
    async def test() -> None:
        async with serving() as server:
            asked = body(72, 105, 33, max_tokens=4, n=2, logprobs=2, prompt_logprobs=1)
            status, answer = await server.post(GENERATE, {**asked, "request_id": "mine"})
            (seen,) = server.engine.seen
        assert status == 200, answer
        assert answer["request_id"] == "mine"
        assert answer["model"] == "fake"
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            assert choice["token_ids"] == list(reply(choice["index"]).encode()[:4])
            assert choice["finish_reason"] == "length"
            names = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert names == [f"token_id:{i}" for i in choice["token_ids"]]
            assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 3
        assert seen.request_id != "mine" and seen.token_ids == [72, 105, 33]

    run(test())


def test_defaults_are_those_of_sampling_params() -> None:
    """Not the model's generation config, which the fake engine's says is temperature 0.5."""

    async def test() -> None:
        async with serving() as server:
            status, answer = await server.post(GENERATE, body())
            (seen,) = server.engine.seen
        assert status == 200
        assert seen.params.temperature == 1.0
        assert seen.params.max_tokens is None  # vLLM's too: not the 16 of the Python API
        assert not seen.params.detokenize
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["logprobs"] is answer["prompt_logprobs"] is None

    run(test())


def test_stream() -> None:
    async def test() -> None:
        async with serving() as server:
            asked = body(max_tokens=6, n=2)
            events = await server.events(
                GENERATE,
                {
                    **asked,
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                },
            )
            plain = await server.events(GENERATE, body(max_tokens=6, logprobs=0))
        *chunks, usage, done = events
        assert done == "[DONE]"
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
        ids: list[list[int]] = [[], []]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            ids[choice["index"]] += choice["token_ids"]
            assert chunk["usage"]["completion_tokens"] == len(ids[choice["index"]])
            assert (choice["finish_reason"] == "length") == (len(ids[choice["index"]]) == 6)
        assert ids == [list(reply(index).encode()[:6]) for index in range(2)]
        assert all("usage" not in chunk for chunk in plain[:-1])
        assert len({chunk["request_id"] for chunk in plain[:-1]}) == 1
        (own,) = plain[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert own["token"] == f"token_id:{plain[0]['choices'][0]['token_ids'][0]}"

    run(test())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [256]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"max_tokens": 5000}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop": ["a"], "detokenize": False}}, "sampling_params.stop"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True},
         "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"logits_processors": ["f"]}}, "sampling_params.logits_processors"),
        ({"sampling_params": {"structured_outputs": {}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"structured_outputs": {"json": "{"}}},
         "sampling_params.structured_outputs.json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            status, answer = await server.post(GENERATE, body() | changes)
            assert status == 400
            assert answer["error"]["param"] == param, answer

    run(test())


def test_model_fails() -> None:
    async def test() -> None:
        async with serving() as server:
            ids = list(b"<fail>")
            assert (await server.post(GENERATE, body(*ids)))[0] == 500
            events = await server.events(GENERATE, body(*ids))
            assert events[-1]["error"]["code"] == "internal_error"
            assert (await server.post(GENERATE, {**body(), "model": "other"}))[0] == 404

    run(test())


def test_a_refusal_names_the_ids_as_the_client_does() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine("tiny", **ENGINE)
        async with serving(engine) as server:
            status, answer = await server.post(GENERATE, body(10**6))
            assert (status, answer["error"]["param"]) == (400, "token_ids")
            assert answer["error"]["message"].startswith("token_ids: token id 1000000 is out of")

    run(test())


def test_structured_outputs() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine("tiny", **ENGINE)
        async with serving(engine) as server:
            ids = engine.tokenizer.encode("Once upon a time")
            asked = body(*ids, structured_outputs={"choice": ["yes", "no"]}, seed=1)
            status, answer = await server.post(GENERATE, asked)
            assert status == 200, answer
            text = engine.tokenizer.decode(answer["choices"][0]["token_ids"])
            assert text in ("yes", "no")

    run(test())


@pytest.mark.slow
def test_tokenize_generate_detokenize_is_a_chat() -> None:
    """With tools in the prompt too: what /tokenize tells is what chat runs."""

    async def test() -> None:
        engine: Any = AsyncLLMEngine("tiny", **ENGINE)
        async with serving(engine) as server:
            function = {"name": "f", "description": "?", "parameters": {"type": "object"}}
            tools = [{"type": "function", "function": function}]
            for more in ({}, {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}):
                asked = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], **more}
                params = {"temperature": 0, "max_tokens": 12}
                _, chat = await server.post(
                    "/v1/chat/completions",
                    {**asked, **params, "tool_choice": "none", "return_token_ids": True},
                )
                _, prompt = await server.post("/tokenize", asked)
                assert prompt["tokens"] == chat["prompt_token_ids"]
                _, answer = await server.post(GENERATE, body(*prompt["tokens"], **params))
                ids = answer["choices"][0]["token_ids"]
                assert ids == chat["choices"][0]["token_ids"]
                _, text = await server.post("/detokenize", {"tokens": ids})
                assert chat["choices"][0]["message"]["content"] in text["prompt"]

    run(test())


@pytest.mark.slow
def test_same_tokens_as_the_python_api() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine("tiny", **ENGINE)
        async with serving(engine) as server:
            ids = engine.tokenizer.encode("Once upon a time")
            for params in (
                {"temperature": 0, "max_tokens": 12},
                {"seed": 5, "max_tokens": 12, "top_p": 0.9, "logprobs": 2},
                {"temperature": 0, "max_tokens": 40, "stop": [" the"]},
            ):
                wanted = await engine.generate({"prompt_token_ids": ids}, SamplingParams(**params))
                asked = body(*ids, **params)
                _, whole = await server.post(GENERATE, asked)
                assert whole["choices"][0]["token_ids"] == wanted.outputs[0].token_ids
                *chunks, _ = await server.events(GENERATE, asked)
                streamed = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
                assert streamed == wanted.outputs[0].token_ids

    run(test())


def test_cached_tokens_are_told_unless_a_flag_forbids() -> None:
    async def test() -> None:
        asked = {**body(max_tokens=2), "stream_options": {"include_usage": True}}
        for told in (True, False):
            async with serving(enable_prompt_tokens_details=told) as server:
                _, whole = await server.post(GENERATE, body(max_tokens=2))
                *_, last, _ = await server.events(GENERATE, asked)
            for usage in (whole["usage"], last["usage"]):
                assert (usage["prompt_tokens_details"] is not None) is told

    run(test())


def test_without_a_tokenizer() -> None:
    """skip_tokenizer_init: ids in and out are served, all that needs texts is refused."""
    chat = {"messages": [{"role": "user", "content": "a"}]}

    async def test() -> None:
        engine: Any = AsyncLLMEngine("tiny", skip_tokenizer_init=True, **ENGINE)
        async with serving(engine) as server:
            asked = body(1, 2, 3, max_tokens=4, temperature=0, logprobs=1)
            status, whole = await server.post(GENERATE, asked)
            assert status == 200, whole
            (choice,) = whole["choices"]
            *chunks, _ = await server.events(GENERATE, asked)
            streamed = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
            assert streamed == choice["token_ids"] and len(streamed) == 4
            names = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert names == [f"token_id:{i}" for i in streamed]
            for path, refused in (
                (GENERATE, body(1, 2, stop=["a"])),
                ("/v1/chat/completions", chat),
                ("/v1/chat/completions/batch", {"messages": [chat["messages"]]}),
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/completions", {"prompt": [1, 2], "echo": True, "max_tokens": 0}),
                ("/v1/messages", {**chat, "model": "tiny", "max_tokens": 3}),
                ("/v1/messages/count_tokens", {**chat, "model": "tiny"}),
                ("/v1/responses", {"input": "a"}),
                ("/tokenize", {"prompt": "a"}),
                ("/tokenize", chat),
                ("/detokenize", {"tokens": [1]}),
            ):
                status, answer = await server.post(path, refused)
                assert status == 400, (path, answer)
                assert "skip_tokenizer_init" in answer["error"]["message"]

    run(test())
