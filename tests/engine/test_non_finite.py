"""A request whose logits are NaN ends with an error, and nobody else notices, then or later."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm import (
    AsyncLLMEngine,
    InvalidRequestError,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
)
from asyncllm.types import NON_FINITE_TOKEN
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.sampler import sample_slots_torch

POISON = 77  # its embedding is NaN here: so are its keys and values, and all that reads them
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=40, seed=1, max_tokens=24, ignore_eos=True, logprobs=2
)
PENALISED = SamplingParams(
    temperature=0, presence_penalty=0.5, logit_bias={5: 1.0}, max_tokens=24, ignore_eos=True
)
WAYS = pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED], ids=["plain", "filtered", "edits"]
)
GOOD = [[11 + i, 12, 13, *range(20, 40)] for i in range(3)]
BAD = [*range(20, 50), POISON, *range(50, 70)]


class Poisoned:
    """An embedding with one row of NaN; the head may share the matrix, and stays as it is."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        vectors = self._embedding(token_ids)
        return vectors.masked_fill((token_ids == POISON).unsqueeze(1), float("nan"))


def poisoned(**args: Any) -> AsyncLLMEngine:
    return AsyncLLMEngine("tiny", num_gpu_blocks_override=14, swap_space=0, **args)


async def outcome(engine: AsyncLLMEngine, prompt: list[int], params: SamplingParams) -> Any:
    try:
        output: RequestOutput = await engine.generate(prompt, params)
    except RequestFailedError as error:
        return error
    return output.outputs[0].token_ids


@WAYS
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["ahead", "synchronous"])
def test_only_the_poisoned_request_fails_and_its_pages_are_clean(
    params: SamplingParams, async_scheduling: bool
) -> None:
    async def test() -> None:
        async with poisoned(async_scheduling=async_scheduling) as engine:
            model = engine._running().worker.runner._model
            expected = [await outcome(engine, prompt, params) for prompt in GOOD]
            expected_later = await outcome(engine, BAD, params)
            engine.reset_prefix_cache()
            embedding, model.embed_tokens = model.embed_tokens, Poisoned(model.embed_tokens)  # type: ignore[attr-defined]
            results = await asyncio.gather(
                *(outcome(engine, prompt, params) for prompt in (GOOD[0], BAD, GOOD[1], BAD[:40]))
            )
            assert [results[0], results[2]] == expected[:2]
            for failed in (results[1], results[3]):
                assert isinstance(failed, RequestFailedError) and "not finite" in str(failed)
            engine.check_idle()
            # Fourteen pages: whoever comes now gets those that the failed ones left.
            again = await asyncio.gather(*(outcome(engine, prompt, params) for prompt in GOOD))
            assert again == expected
            for cache in engine._running().worker.runner._cache.layers:
                assert cache[1:].isfinite().all()
            model.embed_tokens = embedding  # type: ignore[attr-defined]
            assert await outcome(engine, BAD, params) == expected_later, (
                "from a cache that is wrong"
            )
            engine.check_idle()

    asyncio.run(test())


def test_the_sampler_says_which_rows_are_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[1.0, 3.0, 2.0], [1.0, nan, 2.0], [inf, 0.0, 0.0], [-inf, -inf, -inf], [-inf, 5.0, -inf]]
    )
    rows = len(logits)
    for temperature in (0.0, 1.0):
        state = DeviceState(rows, 1, 3, torch.device("cpu"))
        state.temperatures.fill_(temperature)
        state.top_ps.fill_(1.0)
        tokens = sample_slots_torch(state, logits, torch.arange(rows), None, None).tolist()
        assert tokens[1:4] == [NON_FINITE_TOKEN] * 3
        assert tokens[0] in (0, 1, 2) and tokens[4] == 1


FORBIDDEN: list[tuple[SamplingParams, str]] = [
    (SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=3), "allowed_token_ids"),
    (SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=3, top_p=0.9, top_k=5,
                    temperature=0), "allowed_token_ids"),
    (SamplingParams(allowed_token_ids=[9], bad_words=["WORD"], n=2), "allowed_token_ids"),
    (SamplingParams(allowed_token_ids=[9], bad_words=["WORDWORD"], max_tokens=4),
     "allowed_token_ids"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["ahead", "synchronous"])
def test_who_forbids_every_token_is_told_so_and_costs_nobody_the_cache(
    async_scheduling: bool,
) -> None:
    async def test() -> None:
        async with poisoned(async_scheduling=async_scheduling) as engine:
            word = engine.tokenizer.decode([9])
            expected = await outcome(engine, GOOD[0], GREEDY)
            for params, param in FORBIDDEN:
                words = [text.replace("WORD", word) for text in params.bad_words or ()]
                params = replace(params, bad_words=words or None)
                beside = asyncio.create_task(outcome(engine, GOOD[1], GREEDY))
                with pytest.raises(InvalidRequestError, match="no token is left") as found:
                    await engine.generate(BAD, params)
                assert found.value.param == param
                assert isinstance(await beside, list)
            again = await engine.generate(GOOD[0], GREEDY)
            assert again.num_cached_tokens == 16 and again.outputs[0].token_ids == expected
            engine.check_idle()

    asyncio.run(test())


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["ahead", "synchronous"])
def test_who_leaves_before_his_logits_are_seen_leaves_nothing_behind(
    async_scheduling: bool,
) -> None:
    """Its step is in flight, its prompt's blocks are published and its pages free."""

    async def test() -> None:
        async with poisoned(async_scheduling=async_scheduling) as engine:
            core = engine._running()
            model = core.worker.runner._model
            expected = await outcome(engine, BAD, GREEDY)
            engine.reset_prefix_cache()
            embedding, model.embed_tokens = model.embed_tokens, Poisoned(model.embed_tokens)  # type: ignore[attr-defined]
            finish = core.steps.finish

            def leave_first(*step: Any) -> None:
                engine.abort("poisoned")
                finish(*step)

            core.steps.finish = leave_first  # type: ignore[method-assign]
            left = await engine.generate(BAD, GREEDY, request_id="poisoned")
            assert left.outputs[0].finish_reason == "abort"
            core.steps.finish = finish  # type: ignore[method-assign]
            model.embed_tokens = embedding  # type: ignore[attr-defined]
            engine.check_idle()
            assert await outcome(engine, BAD, GREEDY) == expected
            for cache in core.worker.runner._cache.layers:
                assert cache[1:].isfinite().all()

    asyncio.run(test())
