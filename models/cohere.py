"""Cohere: attention and feed-forward run in parallel, with layer norms and interleaved RoPE.

Cohere 2 alternates layers with a window, which rotate, and layers without, which have no positions.
"""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, NormNames
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.rotary import build_rotary, no_rotary
from asyncllm.models.supported import head_order, layer_windows


def cohere(config: ModelConfig, build: Build) -> DecoderSpec:
    """Command R, R7B (which is Cohere 2), R+ (whose heads have norms), Aya."""
    hf, order = config.hf_config, head_order(config, interleaved=True)
    rotary = build_rotary(config, build, order)
    windows: tuple[int | None, ...] = ()
    rotaries, has_head_norms = (rotary,) * config.num_layers, False
    if hf.model_type == "cohere2":
        windows, unrotated = layer_windows(config), no_rotary(config.head_dim, build)
        rotaries = tuple(unrotated if window is None else rotary for window in windows)
    else:
        has_head_norms = hf.use_qk_norm
    bias = hf.attention_bias
    return DecoderSpec(
        windows=windows,
        rotaries=rotaries,
        attention=AttentionSpec(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="own" if has_head_norms else None,
            order=order,
        ),
        norms=NormNames(before_feed_forward=None),
        norm_offset=0.0,  # multiplied by the weight before rounding
        norm_centered=True,
        is_parallel=True,
        logit_scale=hf.logit_scale,
    )
