"""The step benchmark's count of bytes, and that its help works without a GPU."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncllm.model_config import ModelConfig, resolve_model_path
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.registry import build_model
from tests.script_module import import_script
from tests.waiting import PATIENCE_SECONDS

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_step.py"


bench_step = import_script(SCRIPT)


def test_bytes_of_the_built_in_model():
    config = ModelConfig.from_folder(resolve_model_path("tiny"))
    hf = config.hf_config
    model = build_model(config, torch.bfloat16, torch.device("cpu"), TorchOps(), 64)
    weights = sum(load.view.nbytes for load in model.loads())
    per_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert hf.tie_word_embeddings  # so the embedding is read as the head
    assert bench_step.step_bytes(model, hf, 3, 7) == weights + 21 * per_token
    untied = SimpleNamespace(tie_word_embeddings=False)
    embedding = 2 * hf.vocab_size * hf.hidden_size
    assert bench_step.step_bytes(model, untied, 3, 7) == weights + 21 * per_token - embedding


@pytest.mark.slow
def test_help_needs_no_device():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0 and "--context" in done.stdout
