"""Causal self-attention: the projections around the mixer's `attend`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from asyncllm.attention.base import AttentionLayer, HeadNorm, Mixer, Rotation
from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed


class Attention:
    """Grouped-query attention with one merged projection.

    `qk_norm_eps`: RMSNorm over each head of q and k before the rotation, None for no norm.
    """

    def __init__(
        self,
        name: str,
        layer: AttentionLayer,
        hidden_size: int,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
        build: Build,
    ) -> None:
        q_size, kv_size = (n * layer.head_dim for n in (layer.num_heads, layer.num_kv_heads))
        self.qkv_proj = Linear(
            name,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            hidden_size,
            qkv_bias,
            build,
        )
        self.o_proj = Linear(name, {"o_proj": hidden_size}, q_size, output_bias, build)
        self._norm_names = (f"{name}.q_norm.weight", f"{name}.k_norm.weight")
        norm = None
        if qk_norm_eps is not None:
            q_weight, k_weight = build.empty(layer.head_dim), build.empty(layer.head_dim)
            norm = HeadNorm(q_weight, k_weight, qk_norm_eps)
        self.layer = replace(layer, head_norm=norm)

    def add(
        self,
        x: Normed,
        residual: torch.Tensor,
        next_norm: Norm,
        rotation: Rotation,
        mixer: Mixer,
    ) -> Normed:
        """In place: residual [T, hidden_size] += the attention of x. Returns the next norm's."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.layer.head_dim))  # [T, all heads, head_dim]
        out = Normed(mixer.attend(self.layer, qkv, rotation))
        return self.o_proj.with_epilogue(out, AddRMSNorm(residual, next_norm))

    def loads(self) -> Iterator[Load]:
        yield from self.qkv_proj.loads()
        norm = self.layer.head_norm
        if norm is not None:
            yield from map(Load, self._norm_names, (norm.q_weight, norm.k_weight))
        yield from self.o_proj.loads()
