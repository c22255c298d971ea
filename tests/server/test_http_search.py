"""best_of and beam search over HTTP, with the built-in model."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, BeamSearchParams, SamplingParams
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, parse_events, run, serving

ENGINE: dict[str, Any] = {"num_gpu_blocks_override": 400, "max_model_len": 512, "device": "cpu"}
PROMPT = "The cat"


def test_best_of_returns_the_most_likely() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", **ENGINE)
        async with serving(engine) as server:
            fields = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "temperature": 1.5}
            status, body = await server.post(COMPLETIONS, {**fields, "n": 2, "best_of": 6})
            assert status == 200
            params = SamplingParams(n=6, max_tokens=12, seed=5, temperature=1.5, logprobs=0)
            six = (await engine.generate(PROMPT, params)).outputs
        means = {c.text: (c.cumulative_logprob or 0) / len(c.token_ids) for c in six}
        best = sorted(means, key=lambda text: means[text], reverse=True)[:2]
        assert [choice["text"] for choice in body["choices"]] == best
        assert best != [six[0].text, six[1].text]  # the choice is one
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in six)

    run(test())


def test_best_of_with_logprobs() -> None:
    async def test() -> None:
        async with serving(AsyncLLMEngine("tiny", **ENGINE)) as server:
            fields = {"prompt": PROMPT, "max_tokens": 5, "best_of": 3, "logprobs": 2, "n": 1}
            _, body = await server.post(COMPLETIONS, fields)
        (choice,) = body["choices"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])

    run(test())


@pytest.mark.slow
def test_beam_search_as_the_engine_does_it() -> None:
    async def test() -> None:
        engine = AsyncLLMEngine("tiny", **ENGINE)
        async with serving(engine) as server:
            search = {"use_beam_search": True, "n": 3, "max_tokens": 8, "length_penalty": 0.5}
            status, body = await server.post(COMPLETIONS, {"prompt": PROMPT, **search})
            assert status == 200
            beams = await engine.beam_search(
                PROMPT, BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5)
            )
            texts = [beam.text for beam in beams.outputs]
            assert [choice["text"] for choice in body["choices"]] == texts
            assert len(set(texts)) == 3
            assert body["usage"]["completion_tokens"] == sum(
                len(beam.token_ids) for beam in beams.outputs
            )

            search |= {"stream": True, "stream_options": {"include_usage": True}}
            async with server.session.post(
                server.url + COMPLETIONS, json={"prompt": PROMPT, **search}
            ) as response:
                *chunks, usage, done = parse_events(await response.text())
            assert done == "[DONE]" and usage["usage"] == body["usage"]
            parts = dict.fromkeys(range(3), "")
            for chunk in chunks:
                parts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert list(parts.values()) == texts

    run(test())


def test_beams_of_a_chat() -> None:
    async def test() -> None:
        async with serving(AsyncLLMEngine("tiny", **ENGINE)) as server:
            fields = {"messages": HELLO, "use_beam_search": True, "best_of": 4, "max_tokens": 6}
            status, body = await server.post(
                CHAT, {**fields, "n": 2, "logprobs": True, "top_logprobs": 2}
            )
            assert status == 200
            contents = [choice["message"]["content"] for choice in body["choices"]]
            assert len(set(contents)) == 2
            for choice in body["choices"]:
                assert all(len(t["top_logprobs"]) == 2 for t in choice["logprobs"]["content"])

    run(test())
