"""Qwen3: RMSNorm on each head of q and k, biases optional, windows as in Qwen2."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.supported import layer_windows


def build_qwen3(config: ModelConfig, build: Build) -> DenseDecoder:
    return DenseDecoder(config, qwen3_spec(config), build)


def qwen3_spec(config: ModelConfig) -> DecoderSpec:
    bias = config.hf_config.attention_bias
    attention = AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="head")
    return DecoderSpec(layer_windows(config), attention=attention)
