"""Steps of a pipeline that overlap: their order, their recovery, and graphs of their parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    RequestFailedError,
    RequestOutput,
    StructuredOutputsParams,
)
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.step_plan import StepPlan
from asyncllm.types import LaunchedStep
from asyncllm.worker import step_captures
from asyncllm.worker.ranks import processes
from asyncllm.worker.staged_runner import StagedRunner
from tests.parallel.engines import SMALL, Ask, answers, expect_same, greedy
from tests.waiting import run
from tests.worker.recorded_graph import ForgetfulPool

pytestmark = pytest.mark.slow
PROMPTS = ("Once upon a time", "The dog", "A red ball", "In the garden", "My friend")
ASKS = [Ask(prompt, greedy(12 + number)) for number, prompt in enumerate(PROMPTS)]
TWO = SMALL | {"dtype": "float32", "pipeline_parallel_size": 2}


def test_two_steps_of_disjoint_rows_are_begun_before_one_is_ended() -> None:
    async def test() -> None:
        async with AsyncLLMEngine("tiny", **TWO) as engine:
            assert engine._core is not None
            assert not any(engine._core.work.steps.values())  # padding of the start is no step
            steps = engine._core.steps
            begun: list[set[int]] = []  # the sequences of the steps that are begun and not ended
            most, rows = 0, 0
            launch, end = steps.launch, steps.end

            def launched(plan: StepPlan) -> LaunchedStep:
                nonlocal most, rows
                seqs = {seq.seq_id for seq in plan.sampled}
                assert not any(seqs & others for others in begun)
                begun.append(seqs)
                most, rows = max(most, len(begun)), max(rows, len(seqs))
                return launch(plan)

            async def ended(plan: StepPlan, launched: LaunchedStep) -> None:
                assert begun.pop(0) == {seq.seq_id for seq in plan.sampled}
                await end(plan, launched)

            steps.launch, steps.end = launched, ended  # type: ignore[method-assign]
            outputs = await asyncio.gather(*(engine.generate(*ask) for ask in ASKS))
            assert not begun and most == 2
            assert rows == 3  # of five: the sets are as large as each other
            engine.check_idle()
        expect_same(outputs, await answers("tiny", ASKS, dtype="float32"))

    run(test())


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_step_that_fails_while_another_is_begun(is_ahead: bool) -> None:
    """All ranks end what they have begun, and go on in step."""

    async def test() -> None:
        async with AsyncLLMEngine("tiny", **TWO, async_scheduling=is_ahead) as engine:
            assert engine._core is not None
            steps = engine._core.steps
            end, num_ends = steps.end, 0

            async def fails_once(plan: StepPlan, launched: LaunchedStep) -> None:
                nonlocal num_ends
                num_ends += 1
                if num_ends == 6:
                    raise ZeroDivisionError("of this test")
                await end(plan, launched)

            steps.end = fails_once  # type: ignore[method-assign]
            asked = (engine.generate(*ask) for ask in ASKS)
            found: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, RequestFailedError) for each in found), found
            engine.check_idle()
            outputs = await asyncio.gather(*(engine.generate(*ask) for ask in ASKS))
            engine.check_idle()
            engine.check_integrity()
        expect_same(outputs, await answers("tiny", ASKS, dtype="float32"))

    run(test())


def test_graphs_of_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are replayed on both stages are those that are computed. Without adapters, whose
    reference kernel looks at the rows and cannot be recorded."""
    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(step_captures, "GraphPool", ForgetfulPool)
    monkeypatch.setattr(processes, "FOLLOWER", "tests.parallel.recorded_follower")
    asks = [
        *ASKS,
        Ask("A cat", greedy(9, repetition_penalty=1.3)),
        Ask("A boy", greedy(8, structured_outputs=StructuredOutputsParams(regex="[a-z ]{20}"))),
        Ask(" ".join(PROMPTS), greedy(2, prompt_logprobs=1)),
    ]

    async def answered(**how: Any) -> tuple[list[RequestOutput], bool]:
        async with AsyncLLMEngine("tiny", **SMALL | {"dtype": "float32"} | how) as engine:
            outputs = list(await asyncio.gather(*(engine.generate(*ask) for ask in asks)))
            assert engine._core is not None
            runner = engine._core.worker.runner
            has_last = isinstance(runner, StagedRunner) and len(runner.last_graphs[False]) > 0
            return outputs, runner.graphs is not None and has_last

    async def test() -> None:
        sizes = {"prefill_graph_sizes": [8, 16, 32], "cuda_graph_sizes": [2, 4]}
        outputs, is_captured = await answered(pipeline_parallel_size=2, **sizes)
        assert is_captured
        expected, _ = await answered(enforce_eager=True)
        expect_same(outputs, expected)

    run(test())
