"""A whole engine on two ranks whose decode steps are run by the persistent kernel, on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncllm.kernels import persistent_decode
from asyncllm.worker.ranks import processes
from tests.cuda.emulated import compile_for_cpu
from tests.cuda.emulated_rank import FLAGS, KERNEL, NUM_RANKS, SHARED, set_up
from tests.cuda.test_persistent_engine import answers, margins

PATIENCE = "-DMOST_POLLS=5000000"  # another process may be slow
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model whose greedy tokens have clear margins."""
    torch.manual_seed(6)
    config = Qwen3Config(
        vocab_size=528, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
        initializer_range=0.2, dtype="bfloat16",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("is_ahead", [True, False])
def test_the_same_tokens_as_one_rank(
    is_ahead: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers(folder)
    assert min(margins(expected)) > 0.4
    compile_for_cpu(persistent_decode.KERNEL, (*FLAGS, PATIENCE), tmp_path / KERNEL)
    monkeypatch.setenv(SHARED, str(tmp_path))
    monkeypatch.setattr(processes, "FOLLOWER", "tests.cuda.emulated_rank")
    set_up(monkeypatch.setattr)
    ours, kernels = answers(folder, tensor_parallel_size=NUM_RANKS, async_scheduling=is_ahead)
    assert kernels == {"persistent": [2], "layers": [12]}
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in expected]
