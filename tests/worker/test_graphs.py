"""Captured steps against eager ones, on the CPU: graphs are recordings (recorded_graph.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncllm import LLM, RequestOutput, SamplingParams
from asyncllm.attention.base import AttendRows
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.graphs.pool import GraphPool
from asyncllm.graphs.prefill_graphs import PrefillGraphs
from asyncllm.worker import worker
from tests.worker.recorded_graph import RecordedGraph

ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
    "max_model_len": 160,
    "swap_space": 0.01,
}
GRAPHED: dict[str, Any] = ARGS | {
    "prefill_graph_sizes": [4, 8, 16],  # steps of more are eager
    "cuda_graph_sizes": [4],
}
LONG = "What is the capital of France? " * 7  # several chunks
PROMPTS = ["Hi.", "What is 2 + 3?", LONG, f"{LONG} And of Japan?"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
FULL = SamplingParams(
    temperature=0.8, seed=5, top_k=20, repetition_penalty=1.3, logit_bias={101: 4.0}, max_tokens=6
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Recordings are of many small operations, which threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU, of decodes as well."""
    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(worker, "GraphPool", lambda: GraphPool(RecordedGraph))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the prefill graphs that run, in order."""
    sizes: list[int] = []
    replay = PrefillGraphs.replay

    def counted(self: PrefillGraphs, size: int, attend_rows: AttendRows) -> torch.Tensor:
        sizes.append(size)
        return replay(self, size, attend_rows)

    monkeypatch.setattr(PrefillGraphs, "replay", counted)
    return sizes


def answers(params: SamplingParams, **args: Any) -> list[RequestOutput]:
    """To all at once, then to each alone, with most of its prompt in the prefix cache."""
    with LLM("tiny", **args) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt in PROMPTS:
            outputs += llm.generate(prompt, params, use_tqdm=False)
        llm.engine.check_idle()
        return outputs


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [
        entry[token].logprob
        for output in outputs
        if output.prompt_logprobs is not None
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("params", [GREEDY, FULL, SCORED], ids=["greedy", "full", "scored"])
def test_graphed_equals_eager(params: SamplingParams, replayed: list[int]) -> None:
    ours = answers(params, **GRAPHED)
    assert len(set(replayed)) >= 3
    eager = answers(params, **ARGS, enforce_eager=True)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in eager]
    assert logprobs(ours) == pytest.approx(logprobs(eager), abs=1e-3)
