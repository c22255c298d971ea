"""Random adapters, written by peft, and transformers' models with them merged."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PretrainedConfig, PreTrainedModel

from tests.models.tiny_checkpoints import random_reference

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@torch.no_grad()
def write_base(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    model = random_reference(config)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def write_adapter(
    config: PretrainedConfig, folder: Path, seed: int, **settings: Any
) -> torch.nn.Module:
    """Save a random adapter of the random model of `config`; returns the model with it merged."""
    lora = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, **settings})
    # Merging a head of its own changes the configuration of a model whose ends are tied.
    model = get_peft_model(random_reference(deepcopy(config)), lora)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.15, generator=generator)
        elif parameter.requires_grad:  # a bias, or a whole weight
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    model.save_pretrained(str(folder))
    return model.merge_and_unload()
