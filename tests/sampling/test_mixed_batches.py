"""One request's sampling parameters change nothing for others: neighbours keep their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, RepetitionDetectionParams, SamplingParams
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.waiting import run

ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": 160,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "swap_space": 0.01,
    "device": "cpu",
}
NEIGHBOURS = {
    "greedy": ("Once upon a time", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)),
    "seeded": ("The capital of", SamplingParams(seed=5, max_tokens=8, ignore_eos=True)),
    "filtered": (
        "What is 12 + 30?",
        SamplingParams(seed=6, top_k=40, top_p=0.95, n=2, max_tokens=8, ignore_eos=True),
    ),
    "penalised": (
        "Once upon a time",
        SamplingParams(seed=7, frequency_penalty=0.6, max_tokens=8, ignore_eos=True),
    ),
}
FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.3},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {300: 100.0, 20: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [300, 301]},
    "bad_words": {"bad_words": ["e", "there was"]},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False},
    "stop": {"stop": ["a", "e"]},
    "stop_token_ids": {"stop_token_ids": list(range(300, 400))},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "logprob_token_ids": {"logprob_token_ids": [300, 20, 7]},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(4, 1, 2),
        "allowed_token_ids": [300, 301],
    },
    "thinking_token_budget": {"thinking_token_budget": 2},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="[a-e]{9}")},
    "logits_processors": {"logits_processors": [lambda ids, logits: -logits]},
    "n": {"n": 5},
    "max_tokens": {"max_tokens": 3},
    "detokenize": {"detokenize": False},
}


async def neighbours_tokens(engine: AsyncLLMEngine) -> dict[str, list[list[int]]]:
    outputs = await asyncio.gather(*(engine.generate(*request) for request in NEIGHBOURS.values()))
    return {
        name: [completion.token_ids for completion in output.outputs]
        for name, output in zip(NEIGHBOURS, outputs, strict=True)
    }


async def beside(engine: AsyncLLMEngine, fields: dict[str, Any]) -> dict[str, list[list[int]]]:
    """The neighbours' tokens with requests of `fields` before, among and after them."""

    def ask(seed: int) -> Any:
        params = {"seed": seed, "max_tokens": 11, "ignore_eos": True} | fields
        return engine.generate("Once upon a time there was", SamplingParams(**params))

    async def late() -> None:
        await asyncio.sleep(0.01)
        await ask(3)

    before = asyncio.ensure_future(ask(1))
    await asyncio.sleep(0.005)
    tokens, *_ = await asyncio.gather(neighbours_tokens(engine), ask(2), late())
    await before
    return tokens


@pytest.mark.slow
def test_each_parameter_leaves_its_neighbours_tokens_unchanged() -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            alone = {
                name: [c.token_ids for c in (await engine.generate(*request)).outputs]
                for name, request in NEIGHBOURS.items()
            }
            assert await neighbours_tokens(engine) == alone
            for name, fields in FIELDS.items():
                assert await beside(engine, fields) == alone, name
            engine.check_idle()

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    "regime",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 12},
        {"num_gpu_blocks_override": 11, "preemption_mode": "swap", "max_model_len": 96},
        {"num_gpu_blocks_override": 11, "preemption_mode": "recompute", "max_model_len": 96},
        {"max_num_seqs": 3},
    ],
    ids=["ahead", "synchronous", "chunked", "swap", "recompute", "few-slots"],
)
def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch(
    regime: dict[str, Any],
) -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE | regime) as engine:
            params = SamplingParams(seed=11, n=2, max_tokens=30, top_p=0.97, ignore_eos=True)
            alone = (await engine.generate("Once upon a time", params)).outputs
            crowd = [
                engine.generate(f"{i} and {i} is", SamplingParams(seed=i, max_tokens=40))
                for i in range(6)
            ]
            again, *_ = await asyncio.gather(
                engine.generate("Once upon a time", params),
                *crowd,
            )
            assert again.outputs == alone
            assert alone[0].token_ids != alone[1].token_ids
            other = await engine.generate(
                "Once upon a time", SamplingParams(seed=12, max_tokens=30)
            )
            assert other.outputs[0].token_ids != alone[0].token_ids
            stats = engine.stats()
            if regime.get("preemption_mode"):
                assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
            engine.check_idle()

    run(main())


def test_what_is_forbidden_never_comes_and_what_is_asked_for_does() -> None:
    """Hot answers of many seeds at once, each under another kind of rule."""

    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            end = engine.tokenizer.encode("<|im_end|>", False)[0]
            base: dict[str, Any] = {"temperature": 2.0, "n": 4, "max_tokens": 10}
            rules: dict[str, dict[str, Any]] = {
                "bad_words": {"bad_words": ["e", " a", "the"], "ignore_eos": True},
                "min_tokens": {"min_tokens": 7, "logit_bias": {end: 100.0}},
                "allowed": {"allowed_token_ids": [300, 301, 302], "ignore_eos": True},
                "stop": {"stop": ["e"], "ignore_eos": True},
            }
            outputs = await asyncio.gather(
                *(
                    engine.generate("Once upon a time", SamplingParams(seed=1, **base | r))
                    for r in rules.values()
                )
            )
            answers = dict(zip(rules, (output.outputs for output in outputs), strict=True))
            banned = {engine.tokenizer.encode(word, False)[0] for word in ("e", " e", " a", "a")}
            for answer in answers["bad_words"]:
                assert not banned & set(answer.token_ids)
            for answer in answers["min_tokens"]:
                assert len(answer.token_ids) == 7 + 1 and answer.token_ids[-1] == end
            for answer in answers["allowed"]:
                assert set(answer.token_ids) <= {300, 301, 302} and len(answer.token_ids) == 10
            for answer in answers["stop"]:
                assert "e" not in answer.text
                assert answer.finish_reason == ("stop" if answer.stop_reason == "e" else "length")

    run(main())
