"""OLMo 2 and 3: norms behind the sublayers only, and of q and k over all their heads.

OLMo 3 has windows and a rotary for each type of layers.
"""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder, NormNames
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
OFFSET = 0.0  # its norms multiply by their weights before they round


def build_olmo2(config: ModelConfig, build: Build) -> DenseDecoder:
    return _build(config, build, ())


def build_olmo3(config: ModelConfig, build: Build) -> DenseDecoder:
    kinds = config.hf_config.layer_types
    rotaries = {kind: build_rotary(config, build, layer_type=kind) for kind in sorted({*kinds})}
    return _build(config, build, tuple(rotaries[kind] for kind in kinds))


def _build(config: ModelConfig, build: Build, rotaries: tuple[Rotary, ...]) -> DenseDecoder:
    bias = config.hf_config.attention_bias
    spec = DecoderSpec(
        windows=layer_windows(config),
        rotaries=rotaries,
        attention=AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="all", norm_offset=OFFSET),
        norms=NORMS,
        norm_offset=OFFSET,
    )
    return DenseDecoder(config, spec, build)
