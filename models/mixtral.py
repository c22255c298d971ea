"""Mixtral: Mistral with experts in place of the feed-forward of every layer."""

from __future__ import annotations

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, DenseDecoder, FeedForward
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.experts_method import ExpertsShape, load_each
from asyncllm.models.layers.ops import Routing
from asyncllm.models.supported import activation_of, layer_windows, positive

LOAD = load_each(gate="w1", up="w3", down="w2")


def build_mixtral(config: ModelConfig, build: Build) -> DenseDecoder:
    hf = config.hf_config
    shape = ExpertsShape(
        num_experts=positive(config, "num_local_experts"),
        hidden_size=hf.hidden_size,
        size=hf.intermediate_size,
        load=LOAD,
        parts=("w1", "w3", "w2"),
        activation=activation_of(config),
    )
    top_k = positive(config, "num_experts_per_tok", at_most="num_local_experts")
    routing = Routing(top_k, renormalise=True)

    def feed_forward(index: int, name: str) -> FeedForward:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        router = Router(f"{name}.gate", shape, routing, build)
        return Experts(f"{name}.experts", shape, router, build)

    spec = DecoderSpec(layer_windows(config), feed_forward=feed_forward)
    return DenseDecoder(config, spec, build)
