"""Random tiny checkpoints, written by transformers, of every family and RoPE variant we serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import load_weights
from asyncllm.models.registry import build_model

VOCAB_SIZE = 97
WINDOW = 64  # max_position_embeddings
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.2,  # large enough for attention to matter
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
QWEN2_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**SHAPE | changes)


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **parameters}}


PAD = {"pad_token_id": None}
GEMMA = PAD | {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8}
PER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}
LONGROPE_OF_HALF = LONGROPE | {"short_factor": [1.0, 1.2], "long_factor": [2.0, 4.0]}
SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


CONFIGS: dict[str, PretrainedConfig] = {
    "llama": llama(),
    "llama-linear": llama(**rope("linear", factor=2.0)),
    "llama-llama3": llama(**rope("llama3", **LLAMA3)),
    "llama-yarn": llama(**rope("yarn", **YARN)),
    "llama-yarn-mscale": llama(**rope("yarn", **YARN, attention_factor=1.3, beta_fast=8.0)),
    "llama-dynamic": llama(**rope("dynamic", factor=2.0)),
    "llama-longrope": llama(**rope("longrope", **LONGROPE)),
    "llama-mqa": llama(num_key_value_heads=1),
    "llama-mha": llama(num_key_value_heads=4),
    "llama-attention-bias": llama(attention_bias=True),
    "llama-mlp-bias": llama(mlp_bias=True),
    "llama-wide-heads": llama(head_dim=16),
    "llama-tied": llama(tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=None, head_dim=12),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=8),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SHAPE, **rope("yarn", **YARN)),
    "qwen2-windows": Qwen2Config(**SHAPE, **QWEN2_WINDOWS),
    "qwen2-layer-types": Qwen2Config(**SHAPE, **QWEN2_WINDOWS, layer_types=LAYER_TYPES),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-bias-tied": Qwen3Config(
        **SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3-windows": Qwen3Config(**SHAPE, head_dim=16, **QWEN2_WINDOWS),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-sparse": Qwen3MoeConfig(
        **SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=False, mlp_only_layers=[1]
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SHAPE, **EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=2
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False),
    "gemma2": Gemma2Config(**SHAPE, **GEMMA, layer_types=LAYER_TYPES, attn_logit_softcapping=2.0,
                           final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **GEMMA, layer_types=LAYER_TYPES, rope_parameters=PER_TYPE),
    "phi3": Phi3Config(**SHAPE, **PAD),
    "phi3-partial-longrope": Phi3Config(
        **SHAPE, **PAD, **rope("longrope", **LONGROPE_OF_HALF, partial_rotary_factor=0.5)
    ),
    "granite": GraniteConfig(
        **SHAPE, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4,
        attention_multiplier=0.2,
    ),
    "cohere": CohereConfig(**SHAPE, **PAD, logit_scale=0.3, attention_bias=True),
    "cohere-head-norms": CohereConfig(**SHAPE, **PAD, use_qk_norm=True, logit_scale=1.5),
    "cohere2": Cohere2Config(
        **SHAPE, **PAD, logit_scale=0.7, sliding_window=8, layer_types=LAYER_TYPES
    ),
    "olmo2": Olmo2Config(**SHAPE, **PAD),
    "olmo3": Olmo3Config(
        **SHAPE, **PAD, sliding_window=8, layer_types=LAYER_TYPES, rope_parameters=PER_TYPE
    ),
    "glm4": Glm4Config(
        **SHAPE, **PAD, head_dim=16, attention_bias=True,
        **rope("default", partial_rotary_factor=0.5),
    ),
    "glm4-moe": Glm4MoeConfig(
        **SHAPE, **SIGMOID_EXPERTS, head_dim=16, n_group=1, topk_group=1, use_qk_norm=True,
        **rope("default", partial_rotary_factor=0.5),
    ),
    "gpt-oss": GptOssConfig(
        **SHAPE | {"intermediate_size": 24}, **PAD, head_dim=8, num_local_experts=6,
        num_experts_per_tok=2, sliding_window=8, layer_types=LAYER_TYPES, swiglu_limit=0.5,
        **rope("yarn", **YARN),
    ),
    "deepseek-v2": DeepseekV2Config(
        **LATENT, **SIGMOID_EXPERTS, q_lora_rank=None, n_group=3, topk_group=2,
        topk_method="group_limited_greedy", **rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.7),
    ),
    "deepseek-v3": DeepseekV3Config(
        **LATENT, **SIGMOID_EXPERTS, q_lora_rank=20, n_group=3, topk_group=2, norm_topk_prob=True,
        **rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
}  # fmt: skip


@torch.no_grad()
def random_reference(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 transformers model, its norms away from one and its biases away from zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def load(folder: Path, max_model_len: int = WINDOW, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Our model of a checkpoint folder, its weights loaded, on the CPU."""
    model = build(folder, max_model_len, dtype)
    load_weights(model, folder, "auto", seed=0, progress=False)
    return model


def weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """Name in the checkpoint -> what was loaded of it."""
    return {load.name: load.view for load in model.loads()}


def build(
    folder: Path, max_model_len: int = WINDOW, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """The same, its weights uninitialised."""
    return build_model(ModelConfig.from_folder(folder), dtype, CPU, TorchOps(), max_model_len)
