"""The SwiGLU feed-forward: down(silu(gate(x)) * up(x)), gate and up in one matrix product."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear import Linear


class MLP:
    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, bias: bool, build: Build
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._ops = build.ops
        self._gate_up_proj = Linear(name, parts, hidden_size, bias, build)
        self._down_proj = Linear(name, {"down_proj": hidden_size}, intermediate_size, bias, build)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> the same."""
        return self._down_proj(self._ops.silu_and_mul(self._gate_up_proj(x)))

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._gate_up_proj.checkpoint_tensors()
        yield from self._down_proj.checkpoint_tensors()
