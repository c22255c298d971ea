"""Qwen3 with experts in place of the feed-forward, on all layers but those that the file names."""

from __future__ import annotations

from dataclasses import replace

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DenseDecoder, FeedForward
from asyncllm.models.dense import qwen3_spec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.experts_method import ExpertsShape, load_each
from asyncllm.models.layers.mlp import MLP, MLPSpec
from asyncllm.models.layers.ops import Routing
from asyncllm.models.supported import activation_of, positive

LOAD = load_each(gate="gate_proj", up="up_proj", down="down_proj")


def build_qwen3_moe(config: ModelConfig, build: Build) -> DenseDecoder:
    shape = qwen_experts(config)

    def feed_forward(index: int, name: str) -> FeedForward:
        if not has_experts(config, index):
            return dense_mlp(config, name, build)
        router = Router(f"{name}.gate", shape, qwen_routing(config), build)
        return Experts(f"{name}.experts", shape, router, build)

    return DenseDecoder(config, replace(qwen3_spec(config), feed_forward=feed_forward), build)


def qwen_experts(config: ModelConfig) -> ExpertsShape:
    return ExpertsShape(
        num_experts=positive(config, "num_experts"),
        hidden_size=config.hf_config.hidden_size,
        size=positive(config, "moe_intermediate_size"),
        load=LOAD,
        activation=activation_of(config),
    )


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
