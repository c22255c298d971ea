"""Small configurations and random weights for the causal LMs of transformers, by class."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from recurrent_configs import RECURRENT
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 97
# Whatever a configuration calls them; those that it has not are left out.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "sliding_window": 8, "layer_types": None, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_k": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
    "ffn_hidden_size": 48, "shared_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "embedding_size": 32,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0,
    "word_embed_proj_dim": 32, "ffn_dim": 48, "n_inner": 48, "num_kv_heads": 2,
    "query_pre_attn_scalar": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE, "global_head_dim": 16, "num_kv_shared_layers": 0,
    "laurel_rank": 8, "decoder_layers": 3, "encoder_layers": 3, "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "is_decoder": True,
}  # fmt: skip


# What some classes check, tried in this order.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
    {"num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
    {"rotary_dim": 4, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": None},
    {"num_hidden_layers": 4, "rotary_dim": 4, "num_key_value_heads": 4, "full_attn_idxs": None},
]

# What else a class needs: sizes under names of its own, or choices that it checks.
BY_CLASS: dict[str, dict[str, Any]] = {
    "BigBirdForCausalLM": {"attention_type": "original_full", "is_decoder": True},
    "BloomForCausalLM": {"n_layer": 3, "n_head": 4, "seq_length": 64},
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1],
            },
            "full_attention": None,
        },
    },
    "DbrxForCausalLM": {
        "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 3.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "GPTNeoForCausalLM": {
        "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8,
        "num_heads": 4,
    },
    "LongcatFlashForCausalLM": {"num_layers": 2, "head_dim": 4},
    "MegatronBertForCausalLM": {"is_decoder": True},
    "MoshiForCausalLM": {"sliding_window": 64},
    "MptForCausalLM": {"n_heads": 4, "n_layers": 3, "max_seq_len": 64},
    "RemBertForCausalLM": {"is_decoder": True},
    "RoFormerForCausalLM": {"is_decoder": True},
    "XLNetLMHeadModel": {"d_model": 32, "n_head": 4, "d_head": 8, "n_layer": 3, "d_inner": 48},
    "XmodForCausalLM": {"default_language": "en_XX", "languages": ["de_DE", "en_XX"]},
}  # fmt: skip


def tiny_config(architecture: str, **changes: Any) -> Any:
    """The first variant that runs. Where none does, raises what the configuration or model did."""
    problem: Exception | None = None
    for variant in VARIANTS:
        try:
            config = small_config(architecture, BY_CLASS.get(architecture, {}) | changes, variant)
            with torch.inference_mode():
                random_model(config, architecture)(input_ids=torch.arange(3, 9)[None])
            return config
        except Exception as error:  # of no common base
            problem = problem or error
    assert problem is not None
    raise problem


def small_config(
    architecture: str, changes: dict[str, Any], variant: dict[str, Any] | None = None
) -> Any:
    """variant: of which only what the configuration has counts."""
    model_type = next(t for t, c in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if c == architecture)
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class or CONFIG_MAPPING[model_type]
    if architecture in RECURRENT:
        return config_class(**RECURRENT[architecture] | changes)
    if "text_config" in config_class().to_dict():
        inner = type(config_class().get_text_config())
        return config_class(
            text_config=_sizes(inner, variant or {}) | changes, tie_word_embeddings=False
        )
    return config_class(**(_sizes(config_class, variant or {}) | changes))


def _sizes(config_class: Any, variant: dict[str, Any]) -> dict[str, Any]:
    known = {*config_class().to_dict(), *config_class.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:  # which then is the head_dim of what rotates
        sizes.pop("head_dim", None)
    if "kv_lora_rank" in known:  # keys of every head come from the latent
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return sizes | {name: value for name, value in variant.items() if name in known}


def random_model(config: Any, architecture: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, architecture)._from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(0.0, 0.12)
    return model
