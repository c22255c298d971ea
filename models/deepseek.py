"""DeepSeek V2 and V3: latent attention (MLA); experts in groups, and shared experts.

The first layers are dense. V2 routes by softmax, V3 by sigmoid with a correction bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DecoderSpec, FeedForward
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.latent_attention import LatentSpec
from asyncllm.models.layers.mlp import MLP, MLPSpec
from asyncllm.models.layers.ops import Routing
from asyncllm.models.moe import dense_mlp, experts_shape
from asyncllm.models.supported import positive, require, unsupported


def deepseek_v2(config: ModelConfig, build: Build) -> DecoderSpec:
    require(config, topk_method=("greedy", "group_limited_greedy"))
    hf = config.hf_config
    has_groups = hf.topk_method == "group_limited_greedy"
    routing = Routing(
        top_k=positive(config, "num_experts_per_tok", at_most="n_routed_experts"),
        scale=hf.routed_scaling_factor,
        num_groups=_num_groups(config) if has_groups else 1,
        top_groups=positive(config, "topk_group", at_most="n_group") if has_groups else 1,
        group_score="max",
    )
    return _spec(config, shared_experts(config, build, routing, correction=None))


def deepseek_v3(config: ModelConfig, build: Build) -> DecoderSpec:
    require(config, rope_interleave=(None, True))
    return _spec(config, sigmoid_experts(config, build))


def _spec(config: ModelConfig, feed_forward: Callable[[int, str], FeedForward]) -> DecoderSpec:
    hf = config.hf_config
    attention = LatentSpec(
        q_rank=None if hf.q_lora_rank is None else positive(config, "q_lora_rank"),
        kv_rank=positive(config, "kv_lora_rank"),
        plain_dim=positive(config, "qk_nope_head_dim"),
        rotary_dim=positive(config, "qk_rope_head_dim"),
        v_dim=positive(config, "v_head_dim"),
        bias=hf.attention_bias,
    )
    if attention.v_dim > attention.plain_dim + attention.rotary_dim:
        raise unsupported(config, "v_head_dim", "is more than a key has")
    return DecoderSpec(
        attention=attention,
        attention_scale=_scale(config, attention),
        feed_forward=feed_forward,
    )


def _scale(config: ModelConfig, attention: LatentSpec) -> float:
    """YaRN's factor scales the scores here, not cosines and sines."""
    scale = (attention.plain_dim + attention.rotary_dim) ** -0.5
    rope = config.hf_config.rope_parameters or {}
    mscale, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if rope.get("rope_type", "default") == "default" or not mscale or not factor or factor <= 1:
        return scale
    return scale * float(0.1 * mscale * math.log(factor) + 1) ** 2


def sigmoid_experts(config: ModelConfig, build: Build) -> Callable[[int, str], FeedForward]:
    """Experts routed by sigmoid; GLM-4-MoE has them, too."""
    hf = config.hf_config
    routing = Routing(
        top_k=positive(config, "num_experts_per_tok", at_most="n_routed_experts"),
        score="sigmoid",
        renormalise=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        num_groups=_num_groups(config),
        top_groups=positive(config, "topk_group", at_most="n_group"),
        least_sum=1e-20,
    )
    return shared_experts(config, build, routing, correction="e_score_correction_bias")


def _num_groups(config: ModelConfig) -> int:
    num_groups = positive(config, "n_group", at_most="n_routed_experts")
    if config.hf_config.n_routed_experts % num_groups:
        raise unsupported(config, "n_group", f"divides no {config.hf_config.n_routed_experts}")
    return num_groups


def shared_experts(
    config: ModelConfig, build: Build, routing: Routing, correction: str | None
) -> Callable[[int, str], FeedForward]:
    """Experts in all layers but the first `first_k_dense_replace`."""
    hf = config.hf_config
    num_experts = positive(config, "n_routed_experts")
    shape = experts_shape(config, num_experts, positive(config, "moe_intermediate_size"))
    shared_size = shape.size * positive(config, "n_shared_experts")

    def feed_forward(index: int, name: str) -> FeedForward:
        if index < hf.first_k_dense_replace:
            return dense_mlp(config, name, build)
        spec = MLPSpec(activation=shape.activation)
        shared = MLP(f"{name}.shared_experts", hf.hidden_size, shared_size, spec, build)
        gate = f"{name}.gate"
        router = Router(gate, shape, routing, build, in_float32=True, correction=correction)
        return Experts(f"{name}.experts", shape, router, build, shared)

    return feed_forward
