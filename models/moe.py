"""Families with routed experts instead of a dense feed-forward.

Qwen3-MoE: in all layers except those that config.json names. Qwen2-MoE: with a gated shared expert.
OLMoE: with q and k norms over all heads. Mixtral: Mistral with experts in every layer.
"""

from __future__ import annotations

from dataclasses import replace

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, FeedForward
from asyncllm.models.dense import qwen3
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.experts_method import ExpertsShape, load_each
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import MLP, MLPSpec
from asyncllm.models.layers.ops import Routing
from asyncllm.models.supported import activation_of, layer_windows, positive, require

LOAD = load_each(gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_LOAD = load_each(gate="w1", up="w3", down="w2")


def qwen3_moe(config: ModelConfig, build: Build) -> DecoderSpec:
    shape = qwen_experts(config)

    def feed_forward(index: int, name: str) -> FeedForward:
        if not has_experts(config, index):
            return dense_mlp(config, name, build)
        return routed_experts(name, shape, qwen_routing(config), build)

    return replace(qwen3(config, build), feed_forward=feed_forward)


def qwen2_moe(config: ModelConfig, build: Build) -> DecoderSpec:
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

    attention = AttentionSpec(qkv_bias=hf.qkv_bias)
    return DecoderSpec(layer_windows(config), attention=attention, feed_forward=feed_forward)


def olmoe(config: ModelConfig, build: Build) -> DecoderSpec:
    require(config, clip_qkv=(None,))
    hf = config.hf_config
    num_experts = positive(config, "num_experts")
    shape = experts_shape(config, num_experts, hf.intermediate_size)
    bias, routing = hf.attention_bias, qwen_routing(config)
    return DecoderSpec(
        attention=AttentionSpec(qkv_bias=bias, output_bias=bias, qk_norm="all"),
        feed_forward=lambda _, name: routed_experts(name, shape, routing, build),
    )


def mixtral(config: ModelConfig, build: Build) -> DecoderSpec:
    num_experts = positive(config, "num_local_experts")
    shape = experts_shape(config, num_experts, config.hf_config.intermediate_size)
    shape = replace(shape, load=MIXTRAL_LOAD, parts=("w1", "w3", "w2"))
    top_k = positive(config, "num_experts_per_tok", at_most="num_local_experts")
    routing = Routing(top_k, renormalise=True)

    def feed_forward(index: int, name: str) -> FeedForward:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        return routed_experts(name, shape, routing, build)

    return DecoderSpec(layer_windows(config), feed_forward=feed_forward)


def experts_shape(config: ModelConfig, num_experts: int, size: int) -> ExpertsShape:
    hidden, activation = config.hf_config.hidden_size, activation_of(config)
    return ExpertsShape(num_experts, hidden, size, LOAD, activation=activation)


def routed_experts(name: str, shape: ExpertsShape, routing: Routing, build: Build) -> Experts:
    router = Router(f"{name}.gate", shape, routing, build)
    return Experts(f"{name}.experts", shape, router, build)


def qwen_experts(config: ModelConfig) -> ExpertsShape:
    num_experts = positive(config, "num_experts")
    return experts_shape(config, num_experts, positive(config, "moe_intermediate_size"))


def qwen_routing(config: ModelConfig) -> Routing:
    return Routing(
        top_k=positive(config, "num_experts_per_tok", at_most="num_experts"),
        renormalise=config.hf_config.norm_topk_prob,
    )


def has_experts(config: ModelConfig, index: int) -> bool:
    hf = config.hf_config
    is_sparse = (index + 1) % positive(config, "decoder_sparse_step") == 0
    return is_sparse and index not in hf.mlp_only_layers


def dense_mlp(config: ModelConfig, name: str, build: Build) -> MLP:
    hf, spec = config.hf_config, MLPSpec(activation=activation_of(config))
    return MLP(name, hf.hidden_size, hf.intermediate_size, spec, build)
