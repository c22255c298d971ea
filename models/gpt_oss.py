"""gpt-oss in 16 bits: sinks, windows on every other layer, biases, clamped experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load
from asyncllm.models.decoder import DecoderSpec, DenseDecoder, FeedForward
from asyncllm.models.layers.attention import AttentionSpec
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts import Experts, Router
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.ops import Activation, ExpertWeights, Routing
from asyncllm.models.supported import layer_windows, positive, require


def build_gpt_oss(config: ModelConfig, build: Build) -> DenseDecoder:
    require(config, hidden_act=("silu",))  # named so, though another
    hf = config.hf_config
    alpha = getattr(hf, "swiglu_alpha", 1.702)  # transformers 5.17 has it as a constant
    shape = ExpertsShape(
        num_experts=positive(config, "num_local_experts"),
        hidden_size=hf.hidden_size,
        size=hf.intermediate_size,
        load=_load,
        interleaved=True,
        bias=True,
        activation=Activation("clamped", limit=hf.swiglu_limit, alpha=alpha),
    )
    top_k = positive(config, "num_experts_per_tok", at_most="num_local_experts")
    routing = Routing(top_k, "top_softmax")

    def feed_forward(index: int, name: str) -> FeedForward:
        router = Router(f"{name}.router", shape, routing, build, bias=True)
        return Experts(f"{name}.experts", shape, router, build)

    bias = hf.attention_bias
    spec = DecoderSpec(
        windows=layer_windows(config),
        attention=AttentionSpec(qkv_bias=bias, output_bias=bias, sinks=True),
        feed_forward=feed_forward,
    )
    return DenseDecoder(config, spec, build)


def _load(name: str, weights: ExpertWeights) -> Iterator[Load]:
    """Files have all experts in one tensor, inputs before outputs, gates and ups by turns."""
    experts, hidden, size = weights.down.shape
    assert weights.gate_up_bias is not None and weights.down_bias is not None
    shape = (experts, hidden, 2 * size)
    yield Load(f"{name}.gate_up_proj", weights.gate_up, transform=_gate_up, file_shape=shape)
    yield Load(f"{name}.gate_up_proj_bias", weights.gate_up_bias, transform=_gates_first)
    shape = (experts, size, hidden)
    yield Load(f"{name}.down_proj", weights.down, transform=_transposed, file_shape=shape)
    yield Load(f"{name}.down_proj_bias", weights.down_bias)


def _gate_up(loaded: torch.Tensor) -> torch.Tensor:
    return _gates_first(loaded).transpose(1, 2)


def _gates_first(loaded: torch.Tensor) -> torch.Tensor:
    return torch.cat((loaded[..., 0::2], loaded[..., 1::2]), dim=-1)


def _transposed(loaded: torch.Tensor) -> torch.Tensor:
    return loaded.transpose(1, 2)
