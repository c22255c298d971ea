"""Phi-3 and 4: merged projections in the checkpoint, part of a head rotates, longrope."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.mlp import MLPSpec
from asyncllm.models.layers.rotary import build_rotary
from asyncllm.models.supported import head_order, layer_windows


def build_phi3(config: ModelConfig, build: Build) -> DenseDecoder:
    order = head_order(config)
    spec = DecoderSpec(
        windows=layer_windows(config),
        rotaries=(build_rotary(config, build, order),) * config.num_layers,
        attention=AttentionSpec(packed=True, order=order),
        mlp=MLPSpec(packed=True),
    )
    return DenseDecoder(config, spec, build)
