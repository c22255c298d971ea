"""Qwen2 and 2.5: biased q, k, v; a sliding window on the layers that `layer_types` names."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder, unsupported
from asyncllm.models.layers.build import Build


def build_qwen2(config: ModelConfig, build: Build) -> DenseDecoder:
    return DenseDecoder(config, DecoderSpec(windows=layer_windows(config), qkv_bias=True), build)


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """One entry per layer. transformers derives layer_types from use_sliding_window and
    max_window_layers where a checkpoint has none."""
    hf = config.hf_config
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    if not set(hf.layer_types) <= windows.keys() or len(hf.layer_types) != config.num_layers:
        raise unsupported(
            config, "layer_types", f"must be {config.num_layers} of {', '.join(windows)}"
        )
    if "sliding_attention" in hf.layer_types and hf.sliding_window is None:
        raise unsupported(config, "sliding_window", "must be set: layer_types asks for it")
    return tuple(windows[layer_type] for layer_type in hf.layer_types)
