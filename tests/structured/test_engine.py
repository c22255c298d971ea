"""Grammars through the whole engine, on the built-in model: what comes out is what was asked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, InvalidRequestError, SamplingParams, StructuredOutputsParams
from asyncllm.outputs import CompletionOutput
from tests.structured.corpus import CORPUS, closed, is_valid

PROMPT = "Write a record about a dog."
RECORD = CORPUS["record"]


@asynccontextmanager
async def engine(**args: Any) -> AsyncIterator[AsyncLLMEngine]:
    async with AsyncLLMEngine(
        "tiny", **{"max_model_len": 512, "swap_space": 0.01, **args}
    ) as running:
        yield running
        running.check_idle()
        running.check_integrity()


def params(seed: int = 0, **fields: Any) -> SamplingParams:
    sampling = {"max_tokens": 150, "temperature": 1.0, "seed": seed}
    own = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__}
    wanted = StructuredOutputsParams(**fields) if fields else None
    return SamplingParams(**{**sampling, **own}, structured_outputs=wanted)


async def ask(
    running: AsyncLLMEngine, *every: SamplingParams, prompt: str = PROMPT
) -> list[CompletionOutput]:
    """All answers, made at the same time."""
    results = await asyncio.gather(*(running.generate(prompt, p) for p in every))
    return [output for result in results for output in result.outputs]


@pytest.mark.slow
def test_the_corpus_at_temperature_one() -> None:
    """All schemas in one batch; valid wherever complete, and nearly always complete."""

    async def run() -> None:
        async with engine(max_num_seqs=64) as running:
            outputs = await ask(
                running,
                *(
                    params(json=schema, disable_any_whitespace=True, max_tokens=120)
                    for schema in CORPUS.values()
                ),
            )
            cut = []
            for (name, schema), output in zip(CORPUS.items(), outputs, strict=True):
                if output.finish_reason == "stop":
                    assert is_valid(schema, json.loads(output.text)), (name, output.text)
                else:
                    assert output.finish_reason == "length"
                    cut.append(name)
            assert len(cut) <= len(CORPUS) // 10, cut

    asyncio.run(run())


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"[A-Z][a-z]{2,8}, \d{1,3} (km|mi)"}, r"[A-Z][a-z]{2,8}, \d{1,3} (km|mi)"),
    ({"choice": ["red", "green", "dark green"]}, "red|green|dark green"),
    ({"grammar": 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,5}/\n'},
     "<[a-z]{1,5}(,[a-z]{1,5})*>"),
    ({"grammar": 'root ::= item+ "."\nitem ::= "(" [0-9] [0-9]? ")"\n'}, r"(\([0-9]{1,2}\))+\."),
    ({"json_object": True, "disable_any_whitespace": True}, r"(?s)\{.*\}"),
    (
        {"structural_tag": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<f>", "end": "</f>",
            "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}}}},
        "<f>(true|false)</f>",
    ),
]  # fmt: skip


def test_each_kind_beside_free_rows() -> None:
    """Complete answers match; the free rows' tokens are those of a batch without grammars."""

    async def run() -> None:
        free = [
            params(seed=1, max_tokens=40),
            params(temperature=0.0, max_tokens=40),
            params(seed=3, max_tokens=40, top_k=20, logprobs=2),
        ]
        async with engine() as running:
            alone = await ask(running, *free)
            mixed = await ask(
                running, *free, *(params(seed=i, **fields) for i, (fields, _) in enumerate(KINDS))
            )
            assert [o.token_ids for o in mixed[:3]] == [o.token_ids for o in alone]
            finished = 0
            for (_, pattern), output in zip(KINDS, mixed[3:], strict=True):
                if output.finish_reason == "stop":
                    finished += 1
                    assert re.fullmatch(pattern, output.text), output.text
            assert finished >= len(KINDS) - 1

    asyncio.run(run())


WORLDS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "small chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 12, "max_model_len": 128, "max_num_seqs": 8},
}


@pytest.mark.slow
def test_the_same_tokens_however_they_are_scheduled() -> None:
    async def answers(name: str, **args: Any) -> list[list[int]]:
        async with engine(**args) as running:
            seeded = [params(seed=i, json=RECORD, max_tokens=60) for i in range(4)]
            greedy = params(json=RECORD, temperature=0.0, max_tokens=60)
            outputs = await ask(running, *seeded, greedy, params(seed=9, max_tokens=60))
            stats = running.stats()
            num_preempted = stats.num_preemptions_swap + stats.num_preemptions_recompute
            assert (num_preempted > 0) == (name == "preempted")
            return [list(output.token_ids) for output in outputs]

    async def run() -> None:
        expected = await answers("plain")
        for name, args in WORLDS.items():
            assert await answers(name, **args) == expected, name

    asyncio.run(run())


@pytest.mark.slow
def test_several_answers_go_their_own_ways() -> None:
    async def run() -> None:
        async with engine() as running:
            schema = closed({"a": {"type": "string", "maxLength": 20}, "b": {"type": "boolean"}})
            outputs = await ask(running, params(json=schema, n=6, max_tokens=100))
            texts = [output.text for output in outputs if output.finish_reason == "stop"]
            assert len(set(texts)) >= 4
            assert all(is_valid(schema, json.loads(text)) for text in texts)

    asyncio.run(run())


@pytest.mark.slow
def test_where_it_ends() -> None:
    """The grammar decides where a text may end; min_tokens and ignore_eos only where it may not."""

    async def run() -> None:
        async with engine() as running:
            outputs = await ask(
                running,
                params(choice=["yes"], min_tokens=50),
                params(choice=["yes"], ignore_eos=True),
                params(regex="a{1,5}", ignore_eos=True),
                params(regex="[0-9]+", min_tokens=20, max_tokens=100),
                params(choice=["yes, yes, no"], stop=[", n"]),
                params(regex="[0-9]{1000}", max_tokens=10),
            )
            texts = [output.text for output in outputs]
            reasons = [output.finish_reason for output in outputs]
            assert texts[:3] == ["yes", "yes", "aaaaa"]
            assert reasons[:3] == ["stop"] * 3
            assert len(outputs[3].token_ids) > 20
            assert (texts[4], reasons[4]) == ("yes, yes", "stop")
            assert (len(outputs[5].token_ids), reasons[5]) == (10, "length")

    asyncio.run(run())


@pytest.mark.slow
def test_logprobs_stay_those_of_the_model() -> None:
    """With and without logprobs the same tokens: the ones without may jump over forced tokens."""

    async def run() -> None:
        schema = closed({"a_rather_long_property_name": {"type": "boolean"}})
        wanted: dict[str, Any] = {"json": schema, "disable_any_whitespace": True}
        async with engine() as running:
            plain, told = await ask(
                running,
                params(seed=5, **wanted),
                params(seed=5, logprobs=3, **wanted),
            )
            assert plain.token_ids == told.token_ids
            assert told.logprobs is not None and len(told.logprobs) == len(told.token_ids)
            assert is_valid(schema, json.loads(plain.text))

    asyncio.run(run())


def test_refused_before_it_is_queued() -> None:
    async def run() -> None:
        async with engine() as running:
            with pytest.raises(InvalidRequestError, match="'not'") as caught:
                await running.generate(PROMPT, params(json={"not": {}}))
            assert caught.value.param == "structured_outputs.json"
        async with engine(skip_tokenizer_init=True) as running:
            with pytest.raises(InvalidRequestError, match="no tokenizer"):
                await running.generate([1, 2], params(regex="a", detokenize=False))

    asyncio.run(run())
