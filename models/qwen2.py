"""Qwen2 and 2.5: biased q, k, v; a sliding window on the layers that `layer_types` names."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.supported import layer_windows


def build_qwen2(config: ModelConfig, build: Build) -> DenseDecoder:
    # transformers derives layer_types from use_sliding_window and max_window_layers.
    spec = DecoderSpec(layer_windows(config), attention=AttentionSpec(qkv_bias=True))
    return DenseDecoder(config, spec, build)
