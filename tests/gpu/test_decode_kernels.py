"""Engines whose decode steps of few rows the persistent kernel runs, and the autotune of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm import LLM, RequestOutput, SamplingParams
from asyncllm.graphs.decode_graphs import PERSISTENT
from asyncllm.kernels.persistent_decode import KERNEL

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


def answers(**args: Any) -> tuple[list[RequestOutput], dict[str, list[int]]]:
    """To all questions at once, then to each alone; and how the engine ran its steps."""
    with LLM("tiny", **ARGS | args) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, GREEDY, use_tqdm=False)
        for chat in chats:
            outputs += llm.chat(chat, GREEDY, use_tqdm=False)
        return outputs, llm.engine.startup["decode_kernels"]


def test_the_same_tokens_as_by_the_layers() -> None:
    expected, kernels = answers(attention_backend="flashinfer")
    assert kernels.keys() == {"layers"}
    ours, kernels = answers()
    assert kernels == {PERSISTENT: [1, 2, 4, 8], "layers": [16]}
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in expected]
