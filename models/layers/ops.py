"""The kernels that a dense decoder needs besides attention, and what may end a matrix product.

A model is written once against `Ops`; `TorchOps` is the reference and the CPU path, a CUDA
implementation calls fused kernels. All run without a host synchronisation and with shapes that
depend only on their inputs' shapes, so they may be captured in a CUDA graph. An `Epilogue` follows
a product: any linear method's by `apply`, or, where an `Ops` has such a kernel, inside of it.

In the shapes below T is the number of tokens in the step. Tensors share the model's dtype unless
stated otherwise, and are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from asyncllm.kernels.records import SILU as SILU
from asyncllm.kernels.records import Activation as Activation
from asyncllm.kernels.records import ExpertWeights as ExpertWeights
from asyncllm.kernels.records import Norm as Norm
from asyncllm.kernels.records import Normed as Normed
from asyncllm.kernels.records import Routed as Routed
from asyncllm.kernels.records import Routing as Routing

Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


class FusedProducts(Protocol):
    """Products together with what comes after them, in one kernel, where there is one."""

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`swiglu` of the product, in its kernel; None: there is no such kernel for this x."""
        return None

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed | None:
        """`add_rms_norm` of the product, in its kernel; None: there is none, nothing is added."""
        return None


class ExpertAdapters(Protocol):
    """Adds the adapters' part to the experts' products, in place. Rows are sorted by expert:
    `ends` says where each one's end, int32 [experts]."""

    def row_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """The adapter slots of rows that belong to these tokens: [rows]."""
        ...

    def add_gate_up(
        self, product: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """product [rows, 2 * size] of rows [rows, hidden_size]."""
        ...

    def add_down(
        self, product: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """product [rows, hidden_size] of rows [rows, size]."""
        ...


class Ops(FusedProducts, Protocol):
    def before_capture(self) -> None:
        """Choose kernels for the calls since the last one, which will be captured."""
        return None

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32: [T, size], new. Of x
        less its mean, where the norm is centered."""
        ...

    def swiglu(self, x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        """activation(gate) * up, where gate and up are the halves of x [T, 2 * size]: [T, size]."""
        ...

    def swiglu_in_bytes(
        self, x: torch.Tensor, activation: Activation, in_bytes: torch.dtype
    ) -> Normed:
        """`swiglu`, for a product that takes many rows so (`Norm.in_bytes`)."""
        return Normed(self.swiglu(x, activation))

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
    ) -> Routed:
        """logits [T, experts]; correction: float32 [experts], added where experts are chosen, not
        to their gates."""
        ...

    def experts(
        self,
        x: Normed,
        weights: ExpertWeights,
        routed: Routed,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        """The sum of each token's experts by their gates: [T, hidden_size], a new tensor."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> Normed:
        """In place: residual [T, size] += x. Returns the norm of the sum, perhaps in x's memory."""
        ...

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out], a new tensor."""
        ...


class Delta(Protocol):
    """The adapters' part of a product."""

    def add(self, product: torch.Tensor) -> torch.Tensor:
        """In place."""
        ...

    def add_swiglu(self, product: torch.Tensor) -> torch.Tensor:
        """`Ops.swiglu` of the product with the adapters' part, which may be one kernel."""
        ...


class Epilogue(Protocol[Out_co]):
    def apply(self, ops: Ops, product: torch.Tensor) -> Out_co:
        """`product` [T, features] may be overwritten."""
        ...

    def apply_adapted(self, ops: Ops, product: torch.Tensor, delta: Delta) -> Out_co:
        """The same of the product with what adapters add to it."""
        ...

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Out_co | None:
        """The same, of x times an unquantized weight [features, in]; None: not in one kernel."""
        ...


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """The activation of the first half of the features, times the second: [T, features / 2]."""

    activation: Activation = SILU

    def apply(self, ops: Ops, product: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(product, self.activation)

    def apply_adapted(self, ops: Ops, product: torch.Tensor, delta: Delta) -> torch.Tensor:
        if self.activation == SILU:
            return delta.add_swiglu(product)
        return self.apply(ops, delta.add(product))

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.activation != SILU:
            return None
        return ops.product_swiglu(x, weight, bias)


@dataclass(frozen=True, slots=True)
class SwiGLUInBytes:
    """The same for a product behind it that takes many rows quantised (`Norm.in_bytes`)."""

    swiglu: SwiGLU
    in_bytes: torch.dtype

    def apply(self, ops: Ops, product: torch.Tensor) -> Normed:
        return ops.swiglu_in_bytes(product, self.swiglu.activation, self.in_bytes)

    def apply_adapted(self, ops: Ops, product: torch.Tensor, delta: Delta) -> Normed:
        return self.apply(ops, delta.add(product))

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Normed | None:
        made = self.swiglu.fused(ops, x, weight, bias)
        return None if made is None else Normed(made)


@dataclass(frozen=True, slots=True, eq=False)
class AddRMSNorm:
    """In place: residual [T, features] += the product. The result is the norm of the sum, or the
    sum itself where `norm` is None.

    `after` normalises the product first, then `scale` multiplies it.
    """

    residual: torch.Tensor
    norm: Norm | None
    after: Norm | None = None
    scale: float = 1.0

    def apply(self, ops: Ops, product: torch.Tensor) -> Normed:
        if self.after is not None:
            product = ops.rms_norm(product, self.after)
        if self.scale != 1.0:
            product.mul_(self.scale)
        if self.norm is None:
            return Normed(self.residual.add_(product))
        return ops.add_rms_norm(product, self.residual, self.norm)

    def apply_adapted(self, ops: Ops, product: torch.Tensor, delta: Delta) -> Normed:
        return self.apply(ops, delta.add(product))

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Normed | None:
        if self.norm is None or self.norm.centered:
            return None
        if self.after is not None or self.scale != 1.0:
            return None
        return ops.product_add_rms_norm(x, weight, bias, self.residual, self.norm)
