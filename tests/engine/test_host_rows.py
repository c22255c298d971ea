"""Rows that need the host, in the real engine: grammars, jumps, bad words of several tokens.

The grammar is an automaton over token ids. However a request is run, its tokens are the same: one
step ahead or not, alone or not, with or without jumps, preempted or not; nobody else's change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncllm import (
    AsyncLLMEngine,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from asyncllm.engine import constraints
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.engine.input_processor import InputProcessor
from asyncllm.step_plan import StepPlan
from asyncllm.types import Request, Sequence, TokenConstraint
from asyncllm.worker.executor import HostStep
from asyncllm.worker.step_packer import StepPacker
from tests.engine.automaton import Automaton
from tests.engine.sampled_in_full import count_in_full
from tests.waiting import PATIENCE_SECONDS

VOCAB_SIZE = AsyncLLMEngine("tiny").config.model.vocab_size
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, top_k=500, seed=7, max_tokens=30, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0, frequency_penalty=1.5, repetition_penalty=1.3, max_tokens=30, ignore_eos=True
)
WAYS = [GREEDY, SEEDED, PENALISED, SEEDED]
PROMPTS = [[11 + i, 12, 13, *range(20, 40 + 3 * i)] for i in range(4)]
Make = Callable[[int], TokenConstraint]


@pytest.fixture(autouse=True)
def _constraints_from_extra_args(monkeypatch: pytest.MonkeyPatch) -> None:
    """`extra_args["constraint"]` makes that of each sequence, by its index."""
    plain = InputProcessor._sequence

    def _sequence(self: InputProcessor, request: Request, index: int, grammar: Any) -> Sequence:
        seq = plain(self, request, index, grammar)
        make = (request.sampling_params.extra_args or {}).get("constraint")
        if make is not None:
            seq.constraint = make(index)
        return seq

    monkeypatch.setattr(InputProcessor, "_sequence", _sequence)


def automaton(seed: int, forced_share: float = 0.5) -> Make:
    return lambda index: Automaton(10 * seed + index, VOCAB_SIZE, forced_share)


def by(make: Make, params: SamplingParams, **changes: Any) -> SamplingParams:
    return replace(params, extra_args={"constraint": make}, **changes)


async def tokens(engine: AsyncLLMEngine, prompt: list[int], params: SamplingParams) -> Any:
    try:
        output: RequestOutput = await engine.generate(prompt, params)
    except RequestFailedError as error:
        return error
    return [answer.token_ids for answer in output.outputs]


def generate(
    requests: list[tuple[list[int], SamplingParams]], *, at_once: bool = True, **args: Any
) -> list[list[Any]]:
    """In one engine, at once or one by one."""

    async def main() -> list[list[Any]]:
        async with AsyncLLMEngine("tiny", swap_space=0.01, **args) as engine:
            if at_once:
                results = await asyncio.gather(*(tokens(engine, *r) for r in requests))
            else:
                results = [await tokens(engine, *r) for r in requests]
            engine.check_idle()
            return results

    return asyncio.run(main())


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the jumps that engines make."""
    lengths: list[int] = []
    plain = constraints._forced_tokens

    def counted(*args: Any) -> Any:
        found = plain(*args)
        lengths.extend(len(forced) for _, forced in found[0])
        return found

    monkeypatch.setattr(constraints, "_forced_tokens", counted)
    return lengths


def no_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "may_jump_forward", lambda seq: False)


# --- grammars ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_ways_to_run_give_the_tokens_that_the_grammar_allows(
    monkeypatch: pytest.MonkeyPatch, jumps: list[int]
) -> None:
    requests = [(p, by(automaton(i, 0.7), WAYS[i])) for i, p in enumerate(PROMPTS)]
    free = (PROMPTS[0], SEEDED)
    *together, neighbour = generate([*requests, free])
    assert generate([*requests, free], at_once=False) == [*together, neighbour]
    for i, (answer,) in enumerate(together):
        grammar = Automaton(10 * i, VOCAB_SIZE, 0.7)
        assert len(answer) == 30
        for token_id in answer:
            grammar.accept(token_id)
    assert sum(jumps) > 20
    assert generate(requests, async_scheduling=False) == together
    few_pages: dict[str, Any] = {"num_gpu_blocks_override": 10, "enable_prefix_caching": False}
    for mode in ("swap", "recompute"):
        assert generate(requests, preemption_mode=mode, **few_pages) == together
    jumps.clear()
    no_jumps(monkeypatch)
    assert generate(requests) == together and not jumps


@pytest.mark.slow
@pytest.mark.parametrize("jumping", [True, False])
def test_masked_rows_are_the_same_sampled_plainly_and_in_full(
    monkeypatch: pytest.MonkeyPatch, jumping: bool
) -> None:
    """After prefills, after decodes, beside rows without a mask; a bias of nothing is an edit."""
    in_full = count_in_full(monkeypatch)
    if not jumping:
        no_jumps(monkeypatch)
    params = [GREEDY, SEEDED, replace(GREEDY, logprobs=1), replace(SEEDED, n=2)]
    free = (PROMPTS[2], SEEDED)
    requests = [(p, by(automaton(i, 0.5), params[i])) for i, p in enumerate(PROMPTS)]
    plainly = generate([*requests, free], max_num_seqs=8, max_num_batched_tokens=40)
    assert not in_full
    edited = [(p, replace(each, logit_bias={0: 0.0})) for p, each in [*requests, free]]
    assert generate(edited, max_num_seqs=8, max_num_batched_tokens=40) == plainly
    assert len(in_full) > 10


@pytest.mark.slow
def test_jumps_of_a_real_grammar_change_no_token(
    monkeypatch: pytest.MonkeyPatch, jumps: list[int]
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "the_first_of_the_names": {"enum": ["red", "green"]},
            "the_number_of_them": {"type": "integer", "minimum": 10, "maximum": 99},
        },
        "required": ["the_first_of_the_names", "the_number_of_them"],
        "additionalProperties": False,
    }
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    kinds = [GREEDY, SEEDED, PENALISED, replace(SEEDED, n=3)]
    requests = [
        (prompt, replace(params, structured_outputs=wanted, max_tokens=200, ignore_eos=False))
        for prompt, params in zip(PROMPTS, kinds, strict=True)
    ]
    expected = generate(requests)
    assert sum(jumps) > 6 * 10, "most of it is forced"
    assert generate(requests, async_scheduling=False) == expected
    no_jumps(monkeypatch)
    jumps.clear()
    assert generate(requests) == expected and not jumps


def test_each_of_n_answers_has_a_grammar_of_its_own(jumps: list[int]) -> None:
    params = by(automaton(3), SEEDED, n=3)
    (answers,) = generate([(PROMPTS[1], params)])
    for index, answer in enumerate(answers):
        grammar = Automaton(30 + index, VOCAB_SIZE)
        for token_id in answer:
            grammar.accept(token_id)
    assert jumps
    assert [answers] == generate([(PROMPTS[1], params)], async_scheduling=False)


@pytest.mark.slow
def test_logprobs_are_given_for_each_token_so_nothing_jumps(jumps: list[int]) -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", swap_space=0) as engine:
            params = by(automaton(2, 0.7), GREEDY)
            with_logprobs = by(automaton(2, 0.7), GREEDY, logprobs=2)
            output = await engine.generate(PROMPTS[0], with_logprobs)
            assert not jumps
            (answer,) = output.outputs
            assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
            for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                assert entry[token_id].logprob > -100, "raw, before the mask"
            assert await tokens(engine, PROMPTS[0], params) == [answer.token_ids] and jumps

    asyncio.run(main())


def test_a_grammar_wins_over_what_would_leave_nothing() -> None:
    class Only(Automaton):
        def allowed(self, position: int) -> frozenset[int]:
            return frozenset([40, 41] if position % 2 else [40])

    def only(index: int) -> Only:
        return Only(0, VOCAB_SIZE)

    banned = by(only, GREEDY, logit_bias={40: -100.0}, max_tokens=6)
    ((answer,),) = generate([(PROMPTS[0], banned)])
    assert answer[0::2] == [40] * 3 and answer[1::2] == [41] * 3
    stopping = by(only, GREEDY, min_tokens=5, stop_token_ids=[40], max_tokens=9)
    ((answer,),) = generate([(PROMPTS[0], stopping)])
    assert answer == [40], "min_tokens is the grammar's to keep, and this one has no choice"


class Boom(Automaton):
    """Raises in one of its methods, at the fifth token or later."""

    def __init__(self, where: str) -> None:
        super().__init__(1, VOCAB_SIZE, 0.3)
        self._where = where

    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        if self._where == "accept" and self.num_accepted == 5:
            raise ValueError("boom in accept")

    def fill(self, bitmask: np.ndarray) -> None:
        super().fill(bitmask)
        if self._where == "fill" and self.num_accepted >= 5:
            raise RuntimeError("boom in fill")

    def forced_tokens(self) -> list[int]:
        if self._where == "forced_tokens":
            raise RuntimeError("boom in forced_tokens")
        return super().forced_tokens()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["accept", "fill", "forced_tokens"])
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["ahead", "synchronous"])
def test_a_grammar_that_raises_ends_its_own_request(where: str, async_scheduling: bool) -> None:
    good = (PROMPTS[0], by(automaton(1), SEEDED))
    free = (PROMPTS[1], SEEDED)

    async def main() -> None:
        async with AsyncLLMEngine(
            "tiny", swap_space=0, async_scheduling=async_scheduling
        ) as engine:
            expected = [await tokens(engine, *good), await tokens(engine, *free)]
            bad = by(lambda index: Boom(where), GREEDY)
            first, failed, second = await asyncio.gather(
                tokens(engine, *good),
                tokens(engine, PROMPTS[2], bad),
                tokens(engine, *free),
            )
            assert [first, second] == expected
            assert isinstance(failed, RequestFailedError) and f"boom in {where}" in str(failed)
            engine.check_idle()

    asyncio.run(main())


@pytest.mark.slow
def test_all_rows_of_a_step_are_done_in_one_call() -> None:
    sizes: list[int] = []
    fails = False

    class Batched(Automaton):
        @staticmethod
        def accept_many(many: list[Any], token_ids: list[list[int]]) -> list[Exception | None]:
            for one, tokens in zip(many, token_ids, strict=True):
                assert isinstance(one, Batched)
                for token_id in tokens:
                    Automaton.accept(one, token_id)
            is_bad = [fails and one.num_accepted == 3 and one._seed == 30 for one in many]
            return [RuntimeError("boom in accept_many") if bad else None for bad in is_bad]

        @staticmethod
        def fill_many(many: list[Any], bitmasks: np.ndarray) -> list[Exception | None]:
            sizes.append(len(many))
            for one, bitmask in zip(many, bitmasks, strict=True):
                Automaton.fill(one, bitmask)
            is_bad = [fails and one.num_accepted >= 2 and one._seed == 20 for one in many]
            return [RuntimeError("boom in fill_many") if bad else None for bad in is_bad]

    def batched(number: int, index: int) -> Automaton:
        return Batched(10 * number + index, VOCAB_SIZE, 0.0)

    params = replace(GREEDY, max_tokens=6)
    prompts = [*PROMPTS, *PROMPTS]
    plain = [(p, by(automaton(n, 0.0), params)) for n, p in enumerate(prompts)]
    together = [(p, by(partial(batched, n), params)) for n, p in enumerate(prompts)]
    assert generate(together) == generate(plain)
    assert max(sizes) == len(prompts)
    fails = True
    failing = [(p, by(lambda i, n=n: Batched(10 * n, VOCAB_SIZE, 0.0), params))
               for n, p in enumerate(PROMPTS)]  # fmt: skip
    results = generate(failing)
    assert isinstance(results[2], RequestFailedError) and "boom in fill_many" in str(results[2])
    assert isinstance(results[3], RequestFailedError) and "boom in accept_many" in str(results[3])
    assert results[:2] == generate(plain[:2])


# --- the overlap ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_host_rows_run_one_ahead_and_others_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs: list[str] = []

    def note(name: str) -> None:
        plain: Callable[..., Any] = getattr(EngineSteps, name)

        def noted(self: EngineSteps, plan: StepPlan, *args: Any) -> Any:
            verbs.append(f"{name} {plan.step_id}")
            return plain(self, plan, *args)

        monkeypatch.setattr(EngineSteps, name, noted)

    for name in ("launch", "constrain", "finish"):
        note(name)
    short = replace(GREEDY, max_tokens=4)
    words = replace(short, bad_words=["the end of it", "never ever again"])
    for params in (words, by(automaton(1, 0.0), short)):
        verbs.clear()
        generate([(PROMPTS[0], params)])
        assert verbs == [
            "launch 1", "constrain 1",
            "launch 2", "finish 1", "constrain 2",
            "launch 3", "finish 2", "constrain 3",
            "launch 4", "finish 3", "constrain 4",
            "finish 4",
        ]  # fmt: skip
    verbs.clear()
    generate([(PROMPTS[0], short)])
    assert verbs == [
        "launch 1", "launch 2", "finish 1", "launch 3", "finish 2", "launch 4", "finish 3",
        "finish 4",
    ]  # fmt: skip


def test_clients_are_told_of_a_step_while_the_masks_of_the_next_are_filled() -> None:
    """Each fill but the first waits until the client has heard of the token before."""
    heard = threading.Semaphore(0)

    class Slow(Automaton):
        def fill(self, bitmask: np.ndarray) -> None:
            if self.num_accepted:
                assert heard.acquire(timeout=PATIENCE_SECONDS), "told after the masks are filled"
            super().fill(bitmask)

    async def main() -> list[int]:
        async with AsyncLLMEngine("tiny", swap_space=0) as engine:
            params = by(lambda index: Slow(10, VOCAB_SIZE, 0.0), GREEDY, max_tokens=6)
            token_ids: list[int] = []
            async for output in engine.generate(PROMPTS[1], params):
                heard.release()
                token_ids = output.outputs[0].token_ids
            return token_ids

    plain = by(lambda index: Automaton(10, VOCAB_SIZE, 0.0), GREEDY, max_tokens=6)
    assert [[asyncio.run(main())]] == generate([(PROMPTS[1], plain)])


@pytest.mark.slow
def test_a_request_aborted_while_its_grammar_speaks_leaves_nothing() -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", swap_space=0) as engine:
            for turns in range(0, 60, 3):
                task = asyncio.ensure_future(
                    tokens(engine, PROMPTS[0], by(automaton(1, 0.7), GREEDY))
                )
                for _ in range(turns):
                    await asyncio.sleep(0.0005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            expected = await tokens(engine, PROMPTS[0], by(automaton(1, 0.7), GREEDY))
            engine.check_idle()
            outputs.append(expected)

    outputs: list[list[Any]] = []
    asyncio.run(main())
    assert outputs == generate([(PROMPTS[0], by(automaton(1, 0.7), GREEDY))])


@pytest.mark.parametrize("of", [(HostStep, "sample"), (StepPacker, "pack_edits")], ids=str)
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["ahead", "synchronous"])
def test_a_sampling_that_cannot_be_launched_ends_the_step_and_not_the_engine(
    async_scheduling: bool, of: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails before its launch or within it: the recovery launches it again."""
    plain = getattr(*of)
    num_left = 5

    def fails_once(self: Any, *args: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise RuntimeError("no memory for a sampling")
        return plain(self, *args)

    async def main() -> None:
        async with AsyncLLMEngine(
            "tiny", swap_space=0, async_scheduling=async_scheduling
        ) as engine:
            params = by(automaton(1), GREEDY)
            expected = await tokens(engine, PROMPTS[0], params)
            monkeypatch.setattr(*of, fails_once)
            failed = await tokens(engine, PROMPTS[0], params)
            assert isinstance(failed, RequestFailedError)
            assert "no memory for a sampling" in str(failed)
            assert await tokens(engine, PROMPTS[0], params) == expected
            engine.check_idle()

    asyncio.run(main())
