"""What follows a matrix product: small values that a kernel may take into the product itself.

Each can `apply` itself to a product that is there already, which is right for every linear method,
and `fused` asks an `Ops` for one kernel that does both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from asyncllm.models.layers.ops import Norm, Normed, Ops

Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


class Epilogue(Protocol[Out_co]):
    def apply(self, ops: Ops, product: torch.Tensor) -> Out_co:
        """`product` [T, features] may be overwritten."""
        ...

    def fused(
        self, ops: Ops, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Out_co | None:
        """The same, of x times an unquantized weight [features, in]; None: not in one kernel."""
        ...


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """silu of the first half of the features, times the second: [T, features / 2]."""

    def apply(self, ops: Ops, product: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(product)

    def fused(
        self, ops: Ops, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        return ops.product_swiglu(x, weight, bias)


@dataclass(frozen=True, slots=True, eq=False)
class AddRMSNorm:
    """In place: residual [T, features] += the product. The result is the norm of the sum."""

    residual: torch.Tensor
    norm: Norm

    def apply(self, ops: Ops, product: torch.Tensor) -> Normed:
        return ops.add_rms_norm(product, self.residual, self.norm)

    def fused(
        self, ops: Ops, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Normed | None:
        return ops.product_add_rms_norm(x, weight, bias, self.residual, self.norm)
