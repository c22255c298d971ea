"""Python that changes logits: what it may do, what it is given, and that it hurts only its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm import (
    AsyncLLMEngine,
    EngineArgs,
    InvalidRequestError,
    LogitsProcessor,
    ProcessorRow,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = [[11 + i, 12, 13, *range(20, 40 + 3 * i)] for i in range(4)]
Processor = Callable[..., Any]
MODES = pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "synchronous"])


async def outcome(engine: AsyncLLMEngine, prompt: list[int], params: SamplingParams) -> Any:
    try:
        output: RequestOutput = await engine.generate(prompt, params)
    except RequestFailedError as error:
        return error
    return [answer.token_ids for answer in output.outputs]


def generate(requests: list[tuple[list[int], SamplingParams]], **args: Any) -> list[Any]:
    """All at once, in one engine."""

    async def main() -> list[Any]:
        async with AsyncLLMEngine("tiny", swap_space=0.01, **args) as engine:
            results = await asyncio.gather(*(outcome(engine, *r) for r in requests))
            engine.check_idle()
            return results

    return asyncio.run(main())


def by(*processors: Processor, params: SamplingParams = GREEDY, **changes: Any) -> SamplingParams:
    return replace(params, logits_processors=list(processors), **changes)


def count_up(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The n-th token is 100 + n: right only where all tokens before are known."""
    assert output_ids == list(range(100, 100 + len(output_ids)))
    logits[100 + len(output_ids)] = 1e4
    return logits


def say_the_prompt_again(
    prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
) -> torch.Tensor:
    forced = torch.full_like(logits, -1e4)
    forced[prompt_ids[len(output_ids)]] = 0
    return forced


class Callables:
    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return count_up(output_ids, logits)


# --- a request's own -----------------------------------------------------------------------------


@pytest.mark.slow
@MODES
def test_they_see_all_tokens_and_change_only_their_own_row(ahead: bool) -> None:
    requests = [
        (PROMPTS[0], SEEDED),
        (PROMPTS[1], by(count_up)),
        (PROMPTS[2], by(say_the_prompt_again, params=SEEDED)),
        (PROMPTS[3], GREEDY),
        (PROMPTS[1], by(Callables(), n=2, temperature=0.5)),
    ]
    results = generate(requests, async_scheduling=ahead)
    counted = list(range(100, 112))
    assert results[1] == [counted] and results[4] == [counted, counted]
    assert results[2] == [PROMPTS[2][:12]]
    assert [results[0], results[3]] == generate([requests[0], requests[3]])


def test_they_run_in_order_before_other_edits_and_logprobs_stay_raw() -> None:
    def favour_50(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([50, 51]), 1e3)

    def rather_51(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits[50] == logits[51] == 1e3, "after the one before it"
        logits[51] += 1
        return logits

    async def main() -> None:
        async with AsyncLLMEngine("tiny", swap_space=0) as engine:
            params = by(favour_50, rather_51, max_tokens=3)
            assert await outcome(engine, PROMPTS[0], params) == [[51] * 3]
            banned = replace(params, logit_bias={51: -100.0}, logprobs=1)
            output = await engine.generate(PROMPTS[0], banned)
            assert output.outputs[0].token_ids == [50] * 3
            assert output.outputs[0].logprobs is not None
            assert output.outputs[0].logprobs[0][50].logprob < -1, "raw"

    asyncio.run(main())


def boom(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 5:
        raise KeyError("boom")
    return logits


def leave(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def bad_type(output_ids: list[int], logits: torch.Tensor) -> Any:
    return None


def bad_shape(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits[:-1]


def not_a_number(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * float("nan")


def nothing_left(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.fill_(float("-inf"))


@pytest.mark.slow
@MODES
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (boom, "its logits processor failed: KeyError: 'boom'"),
        (leave, "its logits processor failed: SystemExit: 3"),
        (bad_type, "TypeError: it must return a tensor, not NoneType"),
        (bad_shape, "ValueError: it must return logits"),
        (not_a_number, "not finite"),
        (nothing_left, "no token is left"),
    ],
)
def test_one_that_fails_ends_its_own_request(
    processor: Processor, message: str, ahead: bool
) -> None:
    requests = [
        (PROMPTS[0], SEEDED),
        (PROMPTS[1], by(processor)),
        (PROMPTS[2], by(count_up)),
        (PROMPTS[3], by(processor, n=2, temperature=0.9)),
    ]
    results = generate(requests, async_scheduling=ahead)
    for failed in (results[1], results[3]):
        assert isinstance(failed, RequestFailedError) and message in str(failed)
    assert results[2] == [list(range(100, 112))]
    assert len(results[0][0]) == 12


@pytest.mark.parametrize(
    "processors",
    ["no list", [1], [lambda logits: logits], [lambda a, b, c, d: d], [count_up] * 65, [len]],
)
def test_what_is_no_processor_is_refused(processors: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(logits_processors=processors)
    assert refused.value.param == "logits_processors"


# --- the engine's --------------------------------------------------------------------------------


class Favour(LogitsProcessor):
    """Makes `extra_args["favour"]` + the number of tokens so far the next token."""

    made = 0
    updates: list[tuple[list[int], list[int]]]

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__(config, device)
        Favour.made += 1
        Favour.updates = []

    def is_needed(self, params: SamplingParams) -> bool:
        favoured = (params.extra_args or {}).get("favour")
        if favoured is not None and favoured < 0:
            raise ValueError(f"favour must be a token id, got {favoured}")
        return favoured is not None

    def update(self, added: Sequence[ProcessorRow], removed: Sequence[int]) -> None:
        self.updates.append(([row.key for row in added], list(removed)))

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        assert logits.shape == (len(rows), self.config.model.vocab_size)
        for row_logits, row in zip(logits, rows, strict=True):
            assert row.params.extra_args is not None and row.prompt_token_ids[1] == 12
            favoured = row.params.extra_args["favour"]
            assert row.output_token_ids == [favoured + i for i in range(len(row.output_token_ids))]
            if favoured == 666:
                raise RuntimeError("the favoured token is 666")
            row_logits[favoured + len(row.output_token_ids)] = 1e4
        return logits


def favouring(token_id: int, **changes: Any) -> SamplingParams:
    return replace(GREEDY, extra_args={"favour": token_id}, **changes)


@pytest.mark.slow
@MODES
def test_a_class_sees_the_rows_that_need_it(ahead: bool) -> None:
    requests = [
        (PROMPTS[0], SEEDED),
        (PROMPTS[1], favouring(200, max_tokens=5)),
        (PROMPTS[2], favouring(300, n=2, temperature=0.4)),
        (PROMPTS[3], by(count_up)),
    ]
    name = f"{__name__}:Favour"
    results = generate(requests, async_scheduling=ahead, logits_processors=[name])
    assert results[1] == [list(range(200, 205))]
    assert results[2] == [list(range(300, 312))] * 2
    assert results[3] == [list(range(100, 112))]
    added = [key for more, _ in Favour.updates for key in more]
    removed = [key for _, fewer in Favour.updates for key in fewer]
    assert len(added) == len(set(added)) == 3 and len(removed) == 1
    assert results[:1] == generate(requests[:1])


def test_a_class_that_raises_ends_the_requests_that_need_it() -> None:
    requests = [
        (PROMPTS[0], SEEDED),
        (PROMPTS[1], favouring(666)),
        (PROMPTS[2], by(count_up)),
    ]
    results = generate(requests, logits_processors=[Favour])
    assert "RuntimeError: the favoured token is 666" in str(results[1])
    assert results[2] == [list(range(100, 112))] and len(results[0][0]) == 12


def test_a_class_may_refuse_a_request() -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", swap_space=0, logits_processors=[Favour]) as engine:
            with pytest.raises(InvalidRequestError, match="favour must be a token id, got -1"):
                await engine.generate(PROMPTS[0], favouring(-1))
            assert await outcome(engine, PROMPTS[0], favouring(90)) == [list(range(90, 102))]
            engine.check_idle()

    asyncio.run(main())


@pytest.mark.parametrize(
    "named", ["Favour", "nowhere_to_be_found:Favour", f"{__name__}:Nobody", f"{__name__}:count_up"]
)
def test_a_class_that_is_not_there_is_named_at_start(named: str) -> None:
    with pytest.raises(ValueError, match="logits_processors"):
        EngineArgs("tiny", logits_processors=[named]).create_engine_config()
