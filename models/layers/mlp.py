"""The SwiGLU feed-forward: down(silu(gate(x)) * up(x)), gate and up in one matrix product."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.ops import AddRMSNorm, Norm, Normed, SwiGLU

SWIGLU = SwiGLU()


class MLP:
    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, bias: bool, build: Build
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(name, parts, hidden_size, bias, build)
        self.down_proj = Linear(name, {"down_proj": hidden_size}, intermediate_size, bias, build)

    def add(self, x: Normed, residual: torch.Tensor, next_norm: Norm) -> Normed:
        """In place: residual [T, hidden_size] += the feed-forward of x. Returns the next norm's."""
        gated = Normed(self.gate_up_proj.with_epilogue(x, SWIGLU))
        return self.down_proj.with_epilogue(gated, AddRMSNorm(residual, next_norm))

    def loads(self) -> Iterator[Load]:
        yield from self.gate_up_proj.loads()
        yield from self.down_proj.loads()
