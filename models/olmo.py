"""OLMo 2 and 3: norms after the sublayers only; q and k norms over all their heads.

OLMo 3 has windows and one RoPE per layer type.
"""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, NormNames
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.rotary import Rotary, build_rotary
from asyncllm.models.supported import layer_windows

NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)
OFFSET = 0.0  # norms are multiplied by their weight before rounding


def olmo2(config: ModelConfig, build: Build) -> DecoderSpec:
    return _spec(config, ())


def olmo3(config: ModelConfig, build: Build) -> DecoderSpec:
    kinds = config.hf_config.layer_types
    rotaries = {kind: build_rotary(config, build, layer_type=kind) for kind in sorted({*kinds})}
    return _spec(config, tuple(rotaries[kind] for kind in kinds))


def _spec(config: ModelConfig, rotaries: tuple[Rotary, ...]) -> DecoderSpec:
    bias = config.hf_config.attention_bias
    return DecoderSpec(
        windows=layer_windows(config),
        rotaries=rotaries,
        attention=AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="all", norm_offset=OFFSET),
        norms=NORMS,
        norm_offset=OFFSET,
    )
