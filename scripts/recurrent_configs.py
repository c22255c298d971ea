"""Small configurations of transformers' causal LMs with recurrent layers, by class.

Each has layers of every kind that its family mixes, and, where they attend at all, more than one
kind of head or group, so that what is permuted would show.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
ATTENTION: dict[str, Any] = COMMON | {
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_hidden_layers": 3,
}  # fmt: skip
MAMBA2: dict[str, Any] = {  # of hybrids
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
RECURRENT: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": ATTENTION | LATENT | {"head_dim": 8, "layer_group_size": 2},
    "BambaForCausalLM": ATTENTION | MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": ATTENTION | MAMBA2 | {
        "mamba_d_ssm": 64, "head_dim": 8, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
        "key_multiplier": 0.8, "mamba_rms_norm": True,
    },
    "FalconMambaForCausalLM": COMMON | {"num_hidden_layers": 3, "state_size": 8},
    "GraniteMoeHybridForCausalLM": ATTENTION | MAMBA2 | {
        "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "JambaForCausalLM": ATTENTION | {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
        "mamba_d_state": 8,
    },
    "KimiLinearForCausalLM": ATTENTION | LATENT | {
        "layer_types": [LINEAR, FULL, LINEAR], "linear_head_dim": 8, "linear_num_heads": 4,
    },
    "Lfm2ForCausalLM": ATTENTION | {"layer_types": ["conv", FULL, "conv"]},
    "Lfm2MoeForCausalLM": ATTENTION | {
        "layer_types": ["conv", FULL, "conv"], "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "num_dense_layers": 1,
    },
    "Mamba2ForCausalLM": COMMON | {
        "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16,
        "chunk_size": 4,
    },
    "MambaForCausalLM": COMMON | {"num_hidden_layers": 3, "state_size": 8},
    "MiniMaxForCausalLM": ATTENTION | {
        "layer_types": [LINEAR, FULL, LINEAR], "head_dim": 8, "block_size": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "NemotronHForCausalLM": ATTENTION | {
        "num_hidden_layers": 4, "layer_types": [LINEAR, "moe", FULL, "mlp"], "head_dim": 8,
        "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "chunk_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "OlmoHybridForCausalLM": ATTENTION | DELTA | {
        "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR],
    },
    "Qwen3NextForCausalLM": ATTENTION | DELTA | {"layer_types": [LINEAR, FULL] * 2},
    "Qwen3_5ForCausalLM": ATTENTION | DELTA | {"layer_types": [LINEAR, FULL] * 2},
    "Qwen3_5MoeForCausalLM": ATTENTION | DELTA | {"layer_types": [LINEAR, FULL] * 2},
    "Zamba2ForCausalLM": ATTENTION | {
        "num_key_value_heads": 4, "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "num_hidden_layers": 4, "mamba_d_state": 16, "mamba_ngroups": 2, "n_mamba_heads": 8,
        "chunk_size": 4, "num_mem_blocks": 2, "use_shared_attention_adapter": True,
        "adapter_rank": 8,
    },
    "ZambaForCausalLM": ATTENTION | {
        "num_key_value_heads": 4, "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"],
        "num_hidden_layers": 5, "mamba_d_state": 8,
    },
    "ZayaForCausalLM": ATTENTION | {
        "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 8,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 8,
    },
}  # fmt: skip
