"""Experts of transformers' code by `Ops.experts` equal transformers' own function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.integrations import moe

from asyncllm.models import transformers_experts
from asyncllm.models.layers.ops import SILU
from asyncllm.models.layers.torch_ops import TorchOps

NUM_EXPERTS, TOP_K, NUM_TOKENS = 6, 2, 9


def model(architecture: str, **settings: Any) -> Any:
    """A model of one layer."""
    model_class = getattr(transformers, architecture)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
             "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "vocab_size": 64, "num_local_experts": NUM_EXPERTS,
             "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}  # fmt: skip
    made = model_class(model_class.config_class(**sizes | settings)).eval()
    transformers_experts.replace_experts(made, TorchOps())
    return made


def experts_of(made: Any) -> Any:
    (found,) = [each for each in made.modules() if hasattr(each, transformers_experts.OPS)]
    return found


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"])
@torch.inference_mode()
def test_experts_by_the_engines_operations(architecture: str) -> None:
    torch.manual_seed(0)
    experts = experts_of(model(architecture))
    assert transformers_experts._activation(experts) == SILU
    for parameter in experts.parameters():
        parameter.normal_(std=0.2)
    hidden = torch.randn(NUM_TOKENS, 32)
    gates, ids = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(TOP_K)
    expected = moe.grouped_mm_experts_forward(experts, hidden, ids, gates)
    torch.testing.assert_close(experts(hidden, ids, gates), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("GptOssForCausalLM", {}),  # gates and ups in turn, and its own activation
        ("Qwen2MoeForCausalLM", {"hidden_act": "relu"}),
    ],
)
def test_other_experts_are_left_to_transformers(
    architecture: str, settings: dict[str, Any]
) -> None:
    assert transformers_experts._activation(experts_of(model(architecture, **settings))) is None
