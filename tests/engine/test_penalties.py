"""Penalties against plain Python's, whatever becomes of a sequence: each token counts once.

Python's are a logits processor's, which is told all tokens so far and knows the definition alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from asyncllm.engine.engine_steps import EngineSteps
from asyncllm.step_plan import StepPlan
from asyncllm.types import SequenceStatus, StepResult
from tests.engine.sampled_in_full import count_in_full

PROMPTS = [[11 + i, 12, 13, *range(20, 40 + 3 * i)] for i in range(4)]
BASE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PENALTIES: list[dict[str, float]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"repetition_penalty": 0.9},
    {"presence_penalty": -0.7, "frequency_penalty": -0.2},
]
FILTERED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 5}
Request = tuple[list[int], SamplingParams]
FEW_PAGES: dict[str, Any] = {"num_gpu_blocks_override": 10, "enable_prefix_caching": False}
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {},
    "synchronous": {"async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "swap": FEW_PAGES | {"preemption_mode": "swap"},
    "swap, synchronous": FEW_PAGES | {"preemption_mode": "swap", "async_scheduling": False},
    "recompute": FEW_PAGES | {"preemption_mode": "recompute"},
    "few slots": {"max_num_seqs": 2},
}


def in_python(params: SamplingParams) -> SamplingParams:
    """The same penalties by definition."""

    def penalise(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        counts = Counter(output)
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            logits[token] *= 1.0 / factor if logits[token] > 0 else factor
        for token, count in counts.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        return logits

    return replace(
        params,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logits_processors=[penalise],
    )


def requests(**more: Any) -> list[Request]:
    return [
        (prompt, replace(BASE, **penalties, **more))
        for prompt, penalties in zip(PROMPTS, PENALTIES, strict=True)
    ]


def generate(asked: list[Request], *, at_once: bool = True, **args: Any) -> list[list[list[int]]]:
    async def one(engine: AsyncLLMEngine, request: Request) -> list[list[int]]:
        output: RequestOutput = await engine.generate(*request)
        return [answer.token_ids for answer in output.outputs]

    async def main() -> list[list[list[int]]]:
        async with AsyncLLMEngine("tiny", swap_space=0.01, **args) as engine:
            if at_once:
                answers = await asyncio.gather(*(one(engine, request) for request in asked))
            else:
                answers = [await one(engine, request) for request in asked]
            engine.check_idle()
            return list(answers)

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, FILTERED], ids=["greedy", "filtered"])
def test_as_defined(more: dict[str, Any]) -> None:
    asked = requests(**more)
    defined = generate([(prompt, in_python(params)) for prompt, params in asked])
    assert generate(asked) == defined
    plain = generate([(prompt, replace(BASE, **more)) for prompt in PROMPTS])
    assert all(ours != without for ours, without in zip(defined, plain, strict=True))


@pytest.mark.parametrize("name", ENGINES)
def test_whatever_becomes_of_a_sequence(name: str) -> None:
    asked = [*requests(**FILTERED), (PROMPTS[0], replace(BASE, seed=3, temperature=0.9))]
    assert generate(asked, **ENGINES[name]) == generate(asked, at_once=False)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("budget", [16, 512])
def test_counts_are_what_was_said(mode: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, but for the token that the next one counts. Sequences come back to steps of
    decodes alone and to steps with prompts."""
    returned: Counter[bool] = Counter()
    finish = EngineSteps.finish

    def checked(self: EngineSteps, plan: StepPlan, result: StepResult) -> None:
        finish(self, plan, result)
        state = self.worker.runner._state
        for init in plan.slot_inits:
            if len(init.token_ids) > init.seq.num_prompt_tokens:
                returned[bool(plan.prefills)] += 1
        for seq in plan.sampled:
            if seq.status is SequenceStatus.RUNNING:
                counts = state.output_counts[seq.slot]
                said = {int(token): int(counts[token]) for token in counts.nonzero().squeeze(1)}
                assert said == Counter(seq.token_ids[seq.num_prompt_tokens : -1])

    monkeypatch.setattr(EngineSteps, "finish", checked)
    args = FEW_PAGES | {"max_num_seqs": 8, "max_num_batched_tokens": budget}
    asked = [*requests(), *requests(seed=1, temperature=1.0)]
    args["async_scheduling"] = False
    answers = generate(asked, preemption_mode=mode, **args)
    assert answers == generate(asked, at_once=False, async_scheduling=False)
    assert returned[True] and (mode == "recompute" or returned[False])


@pytest.mark.slow
def test_no_step_is_sampled_in_full_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    in_full = count_in_full(monkeypatch)
    generate(requests(**FILTERED))
    assert not in_full


@pytest.mark.slow
def test_beside_rows_that_are_sampled_in_full() -> None:
    """Then all rows are: what is sampled twice counts once."""
    asked = requests()
    edited = (PROMPTS[1], replace(BASE, logit_bias={50: 3.0}, presence_penalty=0.5, min_tokens=3))
    *ours, _ = generate([*asked, edited])
    assert ours == generate(asked, at_once=False)
    assert generate([edited]) == generate([(edited[0], in_python(edited[1]))])


@pytest.mark.slow
def test_tokens_that_are_forced() -> None:
    """Jumped over or sampled one by one, and beside others; `n` answers count for themselves."""
    grammar = StructuredOutputsParams(
        regex="(one|two) and a long forced text (three|four)[a-z ]{9}"
    )
    params = replace(
        BASE, **FILTERED, structured_outputs=grammar, frequency_penalty=0.8, repetition_penalty=1.1
    )
    asked = [(prompt, replace(params, n=2, ignore_eos=False)) for prompt in PROMPTS]
    together = generate(asked, max_num_seqs=8)
    assert together == generate(asked, at_once=False)
    swapped = FEW_PAGES | {"num_gpu_blocks_override": 14, "preemption_mode": "swap"}
    assert together == generate(asked, max_num_seqs=8, **swapped)
