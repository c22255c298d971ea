"""Qwen2 with experts, and beside them one that every token passes through, times its own gate."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder, FeedForward
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import MLP, MLPSpec
from asyncllm.models.qwen3_moe import dense_mlp, has_experts, qwen_experts, qwen_routing
from asyncllm.models.supported import layer_windows, positive


def build_qwen2_moe(config: ModelConfig, build: Build) -> DenseDecoder:
    hf, shape = config.hf_config, qwen_experts(config)

    def feed_forward(index: int, name: str) -> FeedForward:
        if not has_experts(config, index):
            return dense_mlp(config, name, build)
        size = positive(config, "shared_expert_intermediate_size")
        spec = MLPSpec(activation=shape.activation)
        shared = MLP(f"{name}.shared_expert", hf.hidden_size, size, spec, build)
        gate = Linear(name, {"shared_expert_gate": 1}, hf.hidden_size, False, build)
        router = Router(f"{name}.gate", shape, qwen_routing(config), build)
        return Experts(f"{name}.experts", shape, router, build, shared, gate)

    spec = DecoderSpec(
        layer_windows(config),
        attention=AttentionSpec(qkv_bias=hf.qkv_bias),
        feed_forward=feed_forward,
    )
    return DenseDecoder(config, spec, build)
