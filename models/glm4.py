"""GLM-4: norms around every sublayer, and interleaved RoPE over a part of each head.

GLM-4-MoE has Llama's norms, NeoX-style RoPE over a part of each head, and sigmoid routing.
"""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, NormNames
from asyncllm.models.deepseek import sigmoid_experts
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.mlp import MLPSpec
from asyncllm.models.supported import head_order

NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
)


def glm4(config: ModelConfig, build: Build) -> DecoderSpec:
    order = head_order(config, interleaved=True)
    return DecoderSpec(
        attention=AttentionSpec(qkv_bias=config.hf_config.attention_bias, order=order),
        mlp=MLPSpec(packed=True),
        norms=NORMS,
    )


def glm4_moe(config: ModelConfig, build: Build) -> DecoderSpec:
    hf, order = config.hf_config, head_order(config)
    return DecoderSpec(
        attention=AttentionSpec(
            qkv_bias=hf.attention_bias, qk_norm="head" if hf.use_qk_norm else None, order=order
        ),
        feed_forward=sigmoid_experts(config, build),
    )
