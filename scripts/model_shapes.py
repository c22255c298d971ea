"""Published shapes of models as config.json's, cuts of them, and what a step of each must read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncllm.config import EngineArgs
from asyncllm.models.base import CausalLM
from asyncllm.models.registry import settle

Config = dict[str, Any]

_WINDOWED = ["sliding_attention"] * 5 + ["full_attention"]
SHAPES: dict[str, Config] = {
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": (_WINDOWED * 6)[:34],
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
    },
    # With a quarter of its 512 experts, to fit.
    "qwen3-next-128-experts": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
    "granite-4-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4)
        * 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
    },
    "mamba2-2.7b": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": 50288,
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "chunk_size": 256,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}
SHAPES["gpt-oss-20b-mxfp4"] = SHAPES["gpt-oss-20b"] | {  # as published
    "quantization_config": {"quant_method": "mxfp4"}
}
SHAPES["llama-3.1-8b"] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_COMMON = {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}


def cut(shape: Config, layers: int = 6) -> Config:
    """The same widths in fewer layers."""
    small = shape | {"num_hidden_layers": layers}
    if "layer_types" in shape:
        small["layer_types"] = shape["layer_types"][:layers]
    return small


def write_shape(shape: Config, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | shape))
    return folder


class Case(NamedTuple):
    """A shape, and the engine's arguments beside those that all cases have."""

    shape: Config
    args: dict[str, Any]


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in a configuration
_FP8_KV: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
CASES: dict[str, Case] = {name: Case(shape, {}) for name, shape in SHAPES.items()}
CASES |= {
    f"llama-3.1-8b-{name}": Case(SHAPES["llama-3.1-8b"], args)
    for name, args in {
        "fp8": {"quantization": "fp8"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
        "kv8": _FP8_KV,
        "fp8-kv8": {"quantization": "fp8"} | _FP8_KV,
        "int8-kv8": {"quantization": "int8"} | _FP8_KV,
        "int4-kv8": {"quantization": "int4"} | _FP8_KV,
        "transformers": {"model_impl": "transformers"},
        "lora": {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16},
    }.items()
}


def bytes_of_step(args: EngineArgs, rows: int, context: int) -> float:
    """Bytes that a decode step of `rows` rows must read: weights once, of the experts those that
    random tokens touch, all rows' keys, values and states. The embedding is read by rows."""
    config, model = settle(args.create_engine_config())
    page_bytes = getattr(torch, config.kv_cache_dtype).itemsize
    return step_bytes(model, config.model.hf_config, rows, context, page_bytes)


def step_bytes(model: CausalLM, hf: Any, rows: int, context: int, kv_itemsize: int = 2) -> float:
    """As `bytes_of_step`, of a model without memory."""
    num_experts = next((n for name in EXPERT_COUNTS if (n := getattr(hf, name, None))), 1)
    untouched = (1 - getattr(hf, "num_experts_per_tok", 1) / num_experts) ** rows
    total = 0.0
    for load in model.loads():
        is_stacked = load.view.dim() == 3 and len(load.view) == num_experts
        share = 1 - untouched if is_stacked or ".experts." in load.name else 1.0
        is_lookup = "embed_tokens" in load.name and not hf.tie_word_embeddings
        total += 0.0 if is_lookup else share * load.num_bytes
    window_tokens = [min(context, layer.window or context) for layer in model.attention_layers]
    for layer, tokens in zip(model.attention_layers, window_tokens, strict=True):
        parts = 2 if layer.latent_dim is None else 1  # keys and values, or a latent for both
        total += rows * tokens * parts * layer.num_kv_heads * layer.head_dim * kv_itemsize
    for state in model.state_layers:  # read, and written again
        total += 2 * rows * math.prod(state.shape) * state.dtype.itemsize
    return total
