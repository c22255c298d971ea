"""How a linear layer stores its weights and multiplies by them: the seam for quantisation.

A layer owns the tensors that its method creates and hands them back at every call, so one method
serves all layers of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncllm.models.layers.ops import Norm, Normed, Ops


class LinearMethod(Protocol):
    def create_weights(
        self, in_features: int, out_features: int, bias: bool
    ) -> dict[str, torch.Tensor]:
        """Uninitialised tensors on the target device, by their suffix in a checkpoint.

        Dimension 0 of each is the output features: the parts of a merged layer are slices of it.
        """
        ...

    def apply(self, weights: Mapping[str, torch.Tensor], x: Normed) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], the bias added where there is one."""
        ...

    def apply_gated(self, weights: Mapping[str, torch.Tensor], x: Normed) -> torch.Tensor:
        """`Ops.gated_linear`: [T, in_features] -> [T, out_features / 2]."""
        ...

    def apply_add(
        self,
        weights: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        """`Ops.add_linear`: residual [T, out_features] += the product, in place; then its norm."""
        ...


@dataclass(frozen=True, slots=True)
class UnquantizedLinearMethod:
    """Weights in the model's dtype: `weight` [out, in], `bias` [out]."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops

    def create_weights(
        self, in_features: int, out_features: int, bias: bool
    ) -> dict[str, torch.Tensor]:
        shapes = {"weight": (out_features, in_features)} | (
            {"bias": (out_features,)} if bias else {}
        )
        return {
            name: torch.empty(shape, dtype=self.dtype, device=self.device)
            for name, shape in shapes.items()
        }

    def apply(self, weights: Mapping[str, torch.Tensor], x: Normed) -> torch.Tensor:
        return self.ops.linear(x, weights["weight"], weights.get("bias"))

    def apply_gated(self, weights: Mapping[str, torch.Tensor], x: Normed) -> torch.Tensor:
        return self.ops.gated_linear(x, weights["weight"], weights.get("bias"))

    def apply_add(
        self,
        weights: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        return self.ops.add_linear(x, weights["weight"], weights.get("bias"), residual, norm)
