"""RMSNorm of the residual stream: its weight, and its name in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.ops import Norm


class RMSNorm:
    """`constants` are for the matrix products that end or begin with this norm."""

    def __init__(self, name: str, size: int, eps: float, build: Build) -> None:
        self._name = f"{name}.weight"
        self._ops = build.ops
        self.constants = Norm(build.empty(size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> the same shape, a new tensor."""
        return self._ops.rms_norm(x, self.constants)

    def loads(self) -> Iterator[Load]:
        yield Load(self._name, self.constants.weight)
