"""Engines whose decode steps of few rows the persistent kernel runs, and the autotune of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from asyncllm import LLM, RequestOutput, SamplingParams
from asyncllm.kernels.persistent_decode import KERNEL
from asyncllm.worker.decode_autotune import DecodeAutotune
from asyncllm.worker.step_captures import PERSISTENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() not in KERNEL.capabilities,
        reason="needs a CUDA device that the kernel is for",
    ),
]
ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 16,
    "cuda_graph_sizes": [1, 2, 4, 8, 16],
    "swap_space": 0,
}
QUESTIONS = [f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (25, 41))]
QUESTIONS += ["What is the capital of France?", "Spell the word banana.", "Count from 3 to 17."]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def prefer(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """What every autotune finds quickest: 0 for the layers, 1 for the persistent kernel."""

    def autotune(
        self: DecodeAutotune, slots: torch.Tensor, replays: Sequence[Callable[[], None]]
    ) -> list[float]:
        assert len(replays) == 2
        return [0.0 if i == place else 1.0 for i in range(2)]

    monkeypatch.setattr(DecodeAutotune, "__call__", autotune)


def answers() -> tuple[list[RequestOutput], dict[str, list[int]]]:
    """To all questions at once, then to each alone; and how the engine ran its steps."""
    with LLM("tiny", **ARGS) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, GREEDY, use_tqdm=False)
        for chat in chats:
            outputs += llm.chat(chat, GREEDY, use_tqdm=False)
        return outputs, llm.engine.startup["decode_kernels"]


def test_the_same_tokens_as_by_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 0)
    expected, kernels = answers()
    assert kernels.keys() == {"layers"}
    prefer(monkeypatch, 1)
    ours, kernels = answers()
    assert kernels == {PERSISTENT: [1, 2, 4, 8], "layers": [16]}
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in expected]


def test_the_autotune_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asyncllm"), LLM("tiny", **ARGS) as llm:
        state = llm.engine._running().worker.runner._state
        assert not state.positions.any() and not state.block_tables.any()
        for layer in llm.engine._running().worker.runner._cache.layers:
            assert not layer[1:].any() and not layer[0, :, 1:].any()
        kernels = llm.engine.startup["decode_kernels"]
    assert sorted(size for sizes in kernels.values() for size in sizes) == [1, 2, 4, 8, 16]
    times = [message for message in caplog.messages if message.startswith("a decode step of")]
    assert len(times) == 4 and all("persistent" in message for message in times)
