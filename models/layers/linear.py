"""A linear layer, merged or not: several projections of one input are one matrix product.

The layer knows the checkpoint names of its parts and which rows each fills, so loading is a copy
into a view and no weight is ever concatenated:

    weight [out, in]   rows 0..q         q_proj.weight
                       rows q..q+kv      k_proj.weight
                       rows q+kv..q+2kv  v_proj.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from asyncllm.models.layers.build import Build
from asyncllm.models.layers.ops import Norm, Normed


class Linear:
    """`parts`: name below `prefix` -> output features, in the order of the output."""

    def __init__(
        self, prefix: str, parts: Mapping[str, int], in_features: int, bias: bool, build: Build
    ) -> None:
        self._names = [f"{prefix}.{part}" for part in parts]
        self._sizes = list(parts.values())
        self._method = build.linear_method
        self.weights = self._method.create_weights(in_features, sum(self._sizes), bias)

    def __call__(self, x: Normed) -> torch.Tensor:
        """[T, in_features] -> [T, sum of the parts' features]."""
        return self._method.apply(self.weights, x)

    def gated(self, x: Normed) -> torch.Tensor:
        """silu of the first of two equal parts, times the second: [T, features of one]."""
        return self._method.apply_gated(self.weights, x)

    def add(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> Normed:
        """In place: residual += the product. Returns the norm of the sum."""
        return self._method.apply_add(self.weights, x, residual, norm)

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view to fill) of every part of every weight."""
        for suffix, tensor in self.weights.items():
            for name, view in zip(self._names, tensor.split(self._sizes), strict=True):
                yield f"{name}.{suffix}", view
