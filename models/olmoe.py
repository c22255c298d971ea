"""OLMoE: experts in every layer, norms of q and k over all their heads."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder, FeedForward
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.qwen3_moe import LOAD, qwen_routing
from asyncllm.models.supported import activation_of, positive, require


def build_olmoe(config: ModelConfig, build: Build) -> DenseDecoder:
    require(config, clip_qkv=(None,))
    hf = config.hf_config
    shape = ExpertsShape(
        num_experts=positive(config, "num_experts"),
        hidden_size=hf.hidden_size,
        size=hf.intermediate_size,
        load=LOAD,
        activation=activation_of(config),
    )

    def feed_forward(index: int, name: str) -> FeedForward:
        router = Router(f"{name}.gate", shape, qwen_routing(config), build)
        return Experts(f"{name}.experts", shape, router, build)

    bias = hf.attention_bias
    spec = DecoderSpec(
        windows=(None,) * config.num_layers,
        attention=AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="all"),
        feed_forward=feed_forward,
    )
    return DenseDecoder(config, spec, build)
