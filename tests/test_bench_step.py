"""The step benchmark's count of bytes, and that its help works without a GPU."""

import subprocess
import sys
from pathlib import Path

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
    sizes = {load.name: load.view.nbytes for load in model.loads()}
    embedding = 2 * hf.vocab_size * hf.hidden_size
    everything = bench_step.weight_bytes(sizes, tied=True)
    assert everything == sum(sizes.values())
    assert everything - bench_step.weight_bytes(sizes, tied=False) == embedding
    per_token = bench_step.kv_bytes_per_token(config, 2)
    assert per_token == 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert bench_step.decode_bytes(1000, per_token, batch=3, context=7) == 1000 + 21 * per_token


def test_help_needs_no_device():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0 and "--context" in done.stdout
