"""Qwen3: RMSNorm on each head of q and k, biases optional, windows as in Qwen2."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.build import Build
from asyncllm.models.qwen2 import layer_windows


def build_qwen3(config: ModelConfig, build: Build) -> DenseDecoder:
    hf = config.hf_config
    spec = DecoderSpec(
        windows=layer_windows(config),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        qk_norm=True,
    )
    return DenseDecoder(config, spec, build)
