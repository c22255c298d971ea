"""Dense families that differ from each other in a few constants.

Llama 2, 3 and 3.x, and the many checkpoints of that shape; Mistral, with one window for all layers
or none; Qwen2 and 2.5, with biased q, k and v; Qwen3, with a norm of each head; Phi-3 and 4, whose
checkpoints merge projections and of whose heads a part rotates; Granite, with factors on
embeddings, scores, residuals and logits.
"""

from __future__ import annotations

from dataclasses import replace

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.mlp import MLPSpec
from asyncllm.models.layers.rotary import build_rotary
from asyncllm.models.supported import head_order, layer_windows


def build_llama(config: ModelConfig, build: Build) -> DenseDecoder:
    return DenseDecoder(config, _llama_spec(config), build)


def _llama_spec(config: ModelConfig) -> DecoderSpec:
    hf = config.hf_config
    return DecoderSpec(
        windows=(None,) * config.num_layers,
        attention=AttentionSpec(qkv_bias=hf.attention_bias, output_bias=hf.attention_bias),
        mlp=MLPSpec(bias=hf.mlp_bias),
    )


def build_granite(config: ModelConfig, build: Build) -> DenseDecoder:
    hf = config.hf_config
    spec = replace(
        _llama_spec(config),
        attention_scale=hf.attention_multiplier,
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1 / hf.logits_scaling,
    )
    return DenseDecoder(config, spec, build)


def build_mistral(config: ModelConfig, build: Build) -> DenseDecoder:
    spec = DecoderSpec(windows=(config.hf_config.sliding_window,) * config.num_layers)
    return DenseDecoder(config, spec, build)


def build_qwen2(config: ModelConfig, build: Build) -> DenseDecoder:
    # transformers derives layer_types from use_sliding_window and max_window_layers.
    spec = DecoderSpec(layer_windows(config), attention=AttentionSpec(qkv_bias=True))
    return DenseDecoder(config, spec, build)


def build_qwen3(config: ModelConfig, build: Build) -> DenseDecoder:
    return DenseDecoder(config, qwen3_spec(config), build)


def qwen3_spec(config: ModelConfig) -> DecoderSpec:
    bias = config.hf_config.attention_bias
    attention = AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="head")
    return DecoderSpec(layer_windows(config), attention=attention)


def build_phi3(config: ModelConfig, build: Build) -> DenseDecoder:
    order = head_order(config)
    spec = DecoderSpec(
        windows=layer_windows(config),
        rotaries=(build_rotary(config, build, order),) * config.num_layers,
        attention=AttentionSpec(packed=True, order=order),
        mlp=MLPSpec(packed=True),
    )
    return DenseDecoder(config, spec, build)
