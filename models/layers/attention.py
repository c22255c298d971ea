"""Causal self-attention around the backend's `attend`: projections, norm per head, rotation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.attention.base import Attend, AttentionLayer
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.norm import RMSNorm


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
        self.layer = layer
        self._ops = build.ops
        self._heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        self._qkv_proj = Linear(
            name,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            hidden_size,
            qkv_bias,
            build,
        )
        self._o_proj = Linear(name, {"o_proj": hidden_size}, q_size, output_bias, build)
        self._q_norm = self._k_norm = None
        if qk_norm_eps is not None:
            self._q_norm = RMSNorm(f"{name}.q_norm", layer.head_dim, qk_norm_eps, build)
            self._k_norm = RMSNorm(f"{name}.k_norm", layer.head_dim, qk_norm_eps, build)

    def __call__(
        self, x: torch.Tensor, rows: torch.Tensor, cos_sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[T, hidden_size] -> the same; rows [T] and cos_sin as `Ops.rotate` takes them."""
        qkv = self._qkv_proj(x).unflatten(-1, (-1, self.layer.head_dim))  # [T, all heads, head_dim]
        q, k, v = qkv.split(self._heads, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        self._ops.rotate(q, k, rows, cos_sin)
        return self._o_proj(attend(self.layer, q, k, v))

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for child in (self._qkv_proj, self._q_norm, self._k_norm, self._o_proj):
            if child is not None:
                yield from child.checkpoint_tensors()
