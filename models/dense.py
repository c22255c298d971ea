"""Dense families that differ from each other in a few constants.

Llama 2, 3 and 3.x, and the many checkpoints of that shape; Mistral, with one window for all layers
or none; Qwen2 and 2.5, with biased q, k and v; Qwen3, with q and k norms; Phi-3 and 4, with merged
projections in the checkpoint and partial RoPE; Granite, with factors on embeddings, scores,
residuals and logits.
"""

from __future__ import annotations

from dataclasses import replace

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.mlp import MLPSpec
from asyncllm.models.supported import head_order, layer_windows, one_window, positive_number


def llama(config: ModelConfig, build: Build) -> DecoderSpec:
    hf = config.hf_config
    return DecoderSpec(
        attention=AttentionSpec(qkv_bias=hf.attention_bias, output_bias=hf.attention_bias),
        mlp=MLPSpec(bias=hf.mlp_bias),
    )


def granite(config: ModelConfig, build: Build) -> DecoderSpec:
    hf = config.hf_config
    return replace(
        llama(config, build),
        attention_scale=hf.attention_multiplier,
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1 / positive_number(config, "logits_scaling"),
    )


def mistral(config: ModelConfig, build: Build) -> DecoderSpec:
    return DecoderSpec(windows=(one_window(config),) * config.num_layers)


def qwen2(config: ModelConfig, build: Build) -> DecoderSpec:
    # transformers derives layer_types from use_sliding_window and max_window_layers.
    return DecoderSpec(layer_windows(config), attention=AttentionSpec(qkv_bias=True))


def qwen3(config: ModelConfig, build: Build) -> DecoderSpec:
    bias = config.hf_config.attention_bias
    attention = AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="head")
    return DecoderSpec(layer_windows(config), attention=attention)


def phi3(config: ModelConfig, build: Build) -> DecoderSpec:
    return DecoderSpec(
        windows=layer_windows(config),
        attention=AttentionSpec(packed=True, order=head_order(config)),
        mlp=MLPSpec(packed=True),
    )
