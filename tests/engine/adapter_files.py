"""Adapters of the built-in model, written by their documented layout, without peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncllm.model_config import ModelConfig, resolve_model_path

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def write_tiny_adapter(folder: Path, seed: int = 0, rank: int = 4, **settings: Any) -> Path:
    """A random adapter of the built-in model, strong enough to change what it says."""
    config = ModelConfig.from_folder(resolve_model_path("tiny"))
    hf = config.hf_config
    shapes = {
        "self_attn.q_proj": (hf.hidden_size, hf.num_attention_heads * config.head_dim),
        "mlp.down_proj": (hf.intermediate_size, hf.hidden_size),
    }
    return write_adapter(folder, config.num_layers, shapes, seed, rank, **settings)


def write_adapter(
    folder: Path,
    num_layers: int,
    shapes: Mapping[str, tuple[int, int]],
    seed: int = 0,
    rank: int = 4,
    **settings: Any,
) -> Path:
    """A random adapter of each layer's modules, whose inputs and outputs `shapes` has."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module, (features_in, features_out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for part, shape in (("A", (rank, features_in)), ("B", (features_out, rank))):
                weights = torch.randn(*shape, generator=generator) * 0.2
                tensors[f"{name}.lora_{part}.weight"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": rank} | settings))
    return folder
