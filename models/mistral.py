"""Mistral: one sliding window for all layers, or none; heads may be wider than hidden / heads."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.build import Build


def build_mistral(config: ModelConfig, build: Build) -> DenseDecoder:
    spec = DecoderSpec(windows=(config.hf_config.sliding_window,) * config.num_layers)
    return DenseDecoder(config, spec, build)
