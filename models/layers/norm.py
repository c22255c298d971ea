"""RMSNorm of the residual stream, alone or fused with the addition to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.models.layers.build import Build


class RMSNorm:
    def __init__(self, name: str, size: int, eps: float, build: Build) -> None:
        self._name = f"{name}.weight"
        self._weight = build.empty(size)
        self._eps = eps
        self._ops = build.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> the same shape, a new tensor."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """In place on both, [T, size]: residual += x, then x = norm(residual)."""
        self._ops.add_rms_norm(x, residual, self._weight, self._eps)

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield self._name, self._weight
