"""Captured mixed steps, whole ones and pieces, against eager ones, on the built-in model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from asyncllm import LLM, RequestOutput, SamplingParams
from asyncllm.graphs.mixed_graphs import MixedGraphs
from asyncllm.step_plan import StepKind, StepShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "swap_space": 0.1,
    "dtype": "bfloat16",
    "prefill_graph_sizes": [16, 64, 128, 200],
}
NOTES = "Nora likes tea. Ben likes coffee. Ana likes milk. Tom likes juice. "
QUESTIONS = [
    "What is the capital of France?",
    "Spell the word banana.",
    "Count from 3 to 17.",
    f"{NOTES * 9}What does Ben like?",  # over the step's tokens: in chunks
    f"{NOTES * 3}What does Tom like?",
]
LOGPROB_TOLERANCE = 0.15  # bf16, other numbers of rows
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "logprobs": SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0),
    "full": SamplingParams(
        temperature=0.7, seed=7, top_k=9, repetition_penalty=1.1, min_tokens=2, max_tokens=24
    ),
}


def answers(params: SamplingParams, **args: Any) -> list[RequestOutput]:
    """All at once (decodes beside prefills), then each alone behind its cached prefix."""
    with LLM("tiny", **ARGS | args) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS * 3]
        outputs = llm.chat(chats, params, use_tqdm=False)
        for chat in chats[: len(QUESTIONS)]:
            outputs += llm.chat(chat, params, use_tqdm=False)
        llm.engine.check_idle()
        return outputs


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.attention.flashinfer.backend import FlashInferAttention

    monkeypatch.setattr(FlashInferAttention, "step_attention", lambda self, most: None)


@pytest.fixture(params=["whole", "pieces"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pieces":
        in_pieces(monkeypatch)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no card for whole mixed steps")
    return str(request.param)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, StepKind]]:
    """The steps that are replayed: whether by a full graph, and their kinds."""
    replayed: set[tuple[bool, StepKind]] = set()
    replay = MixedGraphs.replay

    def noted(self: MixedGraphs, shape: StepShape, *args: Any) -> None:
        replayed.add((self.is_full, shape.kind))
        replay(self, shape, *args)

    monkeypatch.setattr(MixedGraphs, "replay", noted)
    return replayed


@pytest.mark.parametrize("name", PARAMS)
def test_graphed_equals_eager(name: str, kind: str, replayed: set[tuple[bool, StepKind]]) -> None:
    ours = answers(PARAMS[name])
    is_full = kind == "whole"
    assert replayed == {(is_full, StepKind.PREFILL), (is_full, StepKind.MIXED)}
    eager = answers(PARAMS[name], enforce_eager=True)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in eager]
    for a, b in zip(ours, eager, strict=True):
        for token, x, y in zip(
            a.prompt_token_ids, a.prompt_logprobs or [], b.prompt_logprobs or [], strict=False
        ):
            if x is not None and y is not None:
                assert abs(x[token].logprob - y[token].logprob) < 2 * LOGPROB_TOLERANCE


def test_around_the_edges_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt per step, of exactly so many tokens: below, at and above each size."""
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 199, 200, 201, 256]
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(100, 900) for _ in range(n)]} for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs = []
    for eager, whole in ((0, 1), (0, 0), (1, 0)):
        with monkeypatch.context() as patch:
            if not whole:
                in_pieces(patch)
            llm = LLM("tiny", **ARGS, enforce_eager=bool(eager))
        with llm:
            outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        logprobs.append(
            [
                entry[token].logprob
                for output in outputs
                for token, entry in zip(
                    output.prompt_token_ids, output.prompt_logprobs or [], strict=True
                )
                if entry is not None
            ]
        )
    assert len(logprobs[0]) == sum(lengths) - len(lengths)
    for ours in logprobs[:-1]:
        assert ours == pytest.approx(logprobs[-1], abs=2 * LOGPROB_TOLERANCE)
