"""A model's layers by the kernel for few rows, run on the CPU (emulator.h), between our others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from asyncllm.attention.base import AttentionLayer, Rotation, StepMixer
from asyncllm.kernels.skinny_gemm import KERNEL
from asyncllm.model_config import ModelConfig, resolve_model_path
from asyncllm.models.base import TokenInputs
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import load_weights
from asyncllm.models.registry import build_model
from tests.cuda.emulated import compile_for_cpu

pytest.importorskip("triton")  # the norms are its interpreter's
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted there"),
]

ROWS, NUM_BLOCKS = 9, 6
PATH = resolve_model_path("tiny")
CONFIG = ModelConfig.from_folder(PATH)


def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Nothing of the sort: q goes on as it is."""
    return qkv[:, : layer.num_heads].flatten(1).contiguous()


def logits_by(ops: Ops) -> torch.Tensor:
    cpu = torch.device("cpu")
    model = build_model(CONFIG, torch.bfloat16, cpu, ops, 64)
    load_weights(model, PATH, "auto", 0, progress=False)
    token_ids = torch.arange(100, 100 + ROWS, dtype=torch.int32)
    positions = torch.arange(ROWS, dtype=torch.int32)
    with torch.inference_mode():
        hidden = model.forward(TokenInputs(token_ids, positions), StepMixer(attend))
        return model.compute_logits(hidden).float()


def test_logits_are_those_of_torch(tmp_path: Path) -> None:
    from asyncllm.models.layers.cuda_ops import CudaOps  # needs Triton

    function = compile_for_cpu(KERNEL, (), tmp_path / "skinny_gemm.so")
    launched = []

    def launch(args: object, num_blocks: int, stream: int) -> int:
        launched.append(num_blocks)
        return int(function(args, num_blocks, len(launched)))  # the seed

    ops = CudaOps(torch.device("cpu"))
    kernel = ops._skinny_gemm
    kernel._launch, kernel._num_blocks = launch, NUM_BLOCKS
    ours, expected = logits_by(ops), logits_by(TorchOps())
    assert len(launched) == 4 * CONFIG.num_layers + 1  # its head is small
    assert (ours - expected).norm() < 2e-2 * expected.norm()
    assert torch.equal(ours.argmax(1), expected.argmax(1))
