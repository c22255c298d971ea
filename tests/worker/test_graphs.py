"""Captured steps against eager ones, on the CPU: graphs are recordings (recorded_graph.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import LLM, RequestOutput, SamplingParams
from asyncllm.attention.base import AttendRows, PrefillRows
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.config import EngineArgs
from asyncllm.graphs.decode_graphs import DecodeGraphs
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


@pytest.mark.usefixtures("recorded")
@torch.inference_mode()
def test_padding_is_written_to_the_padding_page(replayed: list[int]) -> None:
    ours = worker.Worker(EngineArgs("tiny", **GRAPHED).create_engine_config())
    forward = ours.runner.mixed_forward
    for num_tokens, page in ((8, 3), (5, 7)):
        tokens = torch.arange(1, num_tokens + 1, dtype=torch.int32)
        rows = (
            np.array(ends, np.int32) for ends in ([0, num_tokens], [num_tokens], [0, 1], [page])
        )
        forward.run(
            tokens[:0],
            0,
            PrefillRows(*rows),
            {
                "prefill_tokens": tokens,
                "prefill_positions": tokens - 1,
                "write_slots": tokens.long() + page * 16,
            },
        )
    assert replayed == [8, 8]
    assert forward.graphs is not None
    slots = forward.graphs.buffers(8).write_slots.tolist()
    assert slots == [113, 114, 115, 116, 117, 0, 0, 0]
    ours.close()


def test_a_capture_that_fails_is_ended_and_may_be_repeated() -> None:
    calls = 0

    def step(slots: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first warms up
            raise MemoryError
        return (slots + 1,)

    graphs = DecodeGraphs(step, 4, GraphPool(RecordedGraph), torch.device("cpu"))
    with pytest.raises(MemoryError):
        graphs.capture(4)
    assert RecordedGraph.open == 0 and gc.isenabled()
    assert graphs.padded_slots(np.array([5], np.int32)) is None
    graphs.capture(4)
    padded = graphs.padded_slots(np.array([5], np.int32))
    assert padded is not None
    graphs.set_slots(padded, torch.from_numpy(padded))
    assert graphs.replay(padded)[0].tolist() == [6, 1, 1, 1]
