"""Llama 2, 3 and 3.x, and the many checkpoints of that shape: optional biases, nothing else."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.mlp import MLPSpec


def build_llama(config: ModelConfig, build: Build) -> DenseDecoder:
    hf = config.hf_config
    spec = DecoderSpec(
        windows=(None,) * config.num_layers,
        attention=AttentionSpec(qkv_bias=hf.attention_bias, output_bias=hf.attention_bias),
        mlp=MLPSpec(bias=hf.mlp_bias),
    )
    return DenseDecoder(config, spec, build)
