"""Granite: Llama with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.mlp import MLPSpec


def build_granite(config: ModelConfig, build: Build) -> DenseDecoder:
    hf = config.hf_config
    spec = DecoderSpec(
        windows=(None,) * config.num_layers,
        attention=AttentionSpec(qkv_bias=hf.attention_bias, output_bias=hf.attention_bias),
        attention_scale=hf.attention_multiplier,
        mlp=MLPSpec(bias=hf.mlp_bias),
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1 / hf.logits_scaling,
    )
    return DenseDecoder(config, spec, build)
