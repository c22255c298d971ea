"""gpt-oss: attention sinks, windows on every other layer, biases, clamped SwiGLU experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load
from asyncllm.models.decoder import DecoderSpec, FeedForward
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.experts_method import ExpertsShape, ExpertsShare
from asyncllm.models.layers.ops import Activation, ExpertWeights, Routing
from asyncllm.models.supported import layer_windows, positive, require


def gpt_oss(config: ModelConfig, build: Build) -> DecoderSpec:
    require(config, hidden_act=("silu",))  # so named, though it is a clamped SwiGLU
    hf = config.hf_config
    # transformers 5.17 has them as constants.
    limit, alpha = getattr(hf, "swiglu_limit", 7.0), getattr(hf, "swiglu_alpha", 1.702)
    shape = ExpertsShape(
        num_experts=positive(config, "num_local_experts"),
        hidden_size=hf.hidden_size,
        size=hf.intermediate_size,
        load=_load,
        interleaved=True,
        bias=True,
        activation=Activation("clamped", limit=limit, alpha=alpha),
    )
    top_k = positive(config, "num_experts_per_tok", at_most="num_local_experts")
    routing = Routing(top_k, "top_softmax")

    def feed_forward(index: int, name: str) -> FeedForward:
        router = Router(f"{name}.router", shape, routing, build, bias=True)
        return Experts(f"{name}.experts", shape, router, build)

    bias = hf.attention_bias
    return DecoderSpec(
        windows=layer_windows(config),
        attention=AttentionSpec(qkv_bias=bias, output_bias=bias, sinks=True),
        feed_forward=feed_forward,
    )


def _load(name: str, weights: ExpertWeights, share: ExpertsShare) -> Iterator[Load]:
    """One tensor holds all experts, transposed, with alternating gate and up columns."""
    hidden, num_experts, size = weights.down.shape[1], share.num_experts, share.full_size
    own, both = share.experts, slice(2 * share.size.start, 2 * share.size.stop)
    all_inputs = slice(None)
    assert weights.gate_up_bias is not None
    down_bias, biased = weights.down_bias, (own,)
    if down_bias is None:  # another rank adds it
        down_bias, biased = weights.down.new_empty(0, hidden), (slice(0),)
    for suffix, view, part, transform, shape in (
        ("gate_up_proj", weights.gate_up, (own, all_inputs, both), _gate_up, (hidden, 2 * size)),
        ("gate_up_proj_bias", weights.gate_up_bias, (own, both), _gates_first, (2 * size,)),
        ("down_proj", weights.down, (own, share.size), _transposed, (size, hidden)),
        ("down_proj_bias", down_bias, biased, None, (hidden,)),
    ):
        yield Load(f"{name}.{suffix}", view, part, transform, file_shape=(num_experts, *shape))


def _gate_up(loaded: torch.Tensor) -> torch.Tensor:
    return _gates_first(loaded).transpose(1, 2)


def _gates_first(loaded: torch.Tensor) -> torch.Tensor:
    return torch.cat((loaded[..., 0::2], loaded[..., 1::2]), dim=-1)


def _transposed(loaded: torch.Tensor) -> torch.Tensor:
    return loaded.transpose(1, 2)
