"""Gemma 2 and 3: norms of 1 + w around every sublayer, windows on most layers, GeGLU.

Gemma 2 soft-caps scores and logits; Gemma 3 has q and k norms and one RoPE per layer type.
"""

from __future__ import annotations

import torch

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, NormNames
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.rotary import build_rotary
from asyncllm.models.supported import layer_windows, positive_number, require

OFFSET = 1.0
NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def gemma(config: ModelConfig, build: Build) -> DecoderSpec:
    require(config, use_bidirectional_attention=(None, False))
    hf, is_third = config.hf_config, config.hf_config.model_type == "gemma3_text"
    rotaries = {}
    if is_third:
        rotaries = {
            kind: build_rotary(config, build, layer_type=kind) for kind in sorted({*hf.layer_types})
        }
    return DecoderSpec(
        windows=layer_windows(config),
        rotaries=tuple(rotaries[kind] for kind in hf.layer_types) if is_third else (),
        attention=AttentionSpec(
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            qk_norm="head" if is_third else None,
            norm_offset=OFFSET,
        ),
        attention_scale=positive_number(config, "query_pre_attn_scalar") ** -0.5,
        # Gemma 3 has the key, but does not cap.
        soft_cap=None if is_third else hf.attn_logit_softcapping,
        norms=NORMS,
        norm_offset=OFFSET,
        # Rounded to the model's dtype, as in training.
        embedding_scale=torch.tensor(hf.hidden_size**0.5, dtype=build.dtype).item(),
        logit_soft_cap=hf.final_logit_softcapping,
    )
