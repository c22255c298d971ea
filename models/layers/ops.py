"""`Ops`, the operations of a decoder besides attention, and epilogues of GEMMs.

Models use `Ops` only. `TorchOps` is the reference, and runs on CPUs; `CudaOps` calls fused kernels.
No operation synchronises with the host, and shapes only depend on the inputs' shapes, so CUDA
graphs can capture them. An `Epilogue` follows a GEMM: separately (`apply`), or fused into its
kernel.

T is the number of tokens in the step. Tensors have the model's dtype, unless stated otherwise, and
are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from asyncllm.kernels.all_reduce import RowSums
from asyncllm.kernels.records import SILU as SILU
from asyncllm.kernels.records import Activation as Activation
from asyncllm.kernels.records import ExpertRange as ExpertRange
from asyncllm.kernels.records import ExpertWeights as ExpertWeights
from asyncllm.kernels.records import Norm as Norm
from asyncllm.kernels.records import Normed as Normed
from asyncllm.kernels.records import Routed as Routed
from asyncllm.kernels.records import Routing as Routing
from asyncllm.models.parallel.mesh import Mesh

Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


class FusedProducts(Protocol):
    """GEMMs fused with the operation after them, where there is such a kernel."""

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The product and `swiglu` in one kernel; None: there is no such kernel for this x."""
        return None

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed | None:
        """The product and `add_rms_norm` in one kernel; None: there is no such kernel."""
        return None


class ExpertAdapters(Protocol):
    """Adds LoRA to the experts' GEMMs, in place. Rows are sorted by expert; ends: the end of each
    expert's rows, int32 [experts]."""

    def row_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """The adapter slots of the rows of these tokens: [rows]."""
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
    def agree(self, least: Callable[[int], int]) -> None:
        """Use only kernels that all ranks can run, which all call this. least: the minimum of a
        number over them."""
        return None

    def before_capture(self) -> None:
        """Autotune the calls since the last one, which are about to be captured."""
        return None

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32: [T, size], a new
        tensor. A centered norm subtracts the mean of x first."""
        ...

    def swiglu(self, x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        """activation(gate) * up, with gate and up the halves of x [T, 2 * size]: [T, size]."""
        ...

    def swiglu_in_bytes(
        self, x: torch.Tensor, activation: Activation, in_bytes: torch.dtype
    ) -> Normed:
        """`swiglu`, quantised for a GEMM that takes many rows in 8 bits (`Norm.in_bytes`)."""
        return Normed(self.swiglu(x, activation))

    def route(
        self,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        routing: Routing,
        slots: torch.Tensor | None = None,
    ) -> Routed:
        """Route by logits [T, experts]. correction: float32 [experts], added to scores for the
        choice of experts, but not to gates. slots: int32 [T], of the tokens' sequences, where
        experts are divided: the padding slot's get the id `experts`, which nobody has."""
        ...

    def experts(
        self,
        x: Normed,
        weights: ExpertWeights,
        routed: Routed,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        """The sum of each token's experts, weighted by gates: [T, hidden_size], a new tensor."""
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        sums: RowSums | None = None,
    ) -> Normed:
        """residual [T, size] += x, in place. Returns the norm of the sum, possibly in x's memory.
        sums: x is this rank's summand, to be added over ranks first."""
        ...

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] @ weight[out, in].T + bias [out]: [T, out], a new tensor."""
        ...


class Delta(Protocol):
    """The adapters' part of a product."""

    def add(self, product: torch.Tensor) -> torch.Tensor:
        """Possibly in place."""
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
        product = delta.add(product)  # which gives back the memory of a longer one
        return self.apply(ops, product)

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Out_co | None:
        """The product of x and a weight [features, in], and the epilogue, in one kernel; None:
        there is no such kernel."""
        ...


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """activation(first half of the features) * second half: [T, features / 2]."""

    activation: Activation = SILU

    def apply(self, ops: Ops, product: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(product, self.activation)

    def apply_adapted(self, ops: Ops, product: torch.Tensor, delta: Delta) -> torch.Tensor:
        if self.activation == SILU:
            return delta.add_swiglu(product)
        product = delta.add(product)
        return self.apply(ops, product)

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.activation != SILU:
            return None
        return ops.product_swiglu(x, weight, bias)


@dataclass(frozen=True, slots=True)
class SwiGLUInBytes(Epilogue[Normed]):
    """`SwiGLU` for a following GEMM that takes many rows in 8 bits (`Norm.in_bytes`)."""

    swiglu: SwiGLU
    in_bytes: torch.dtype

    def apply(self, ops: Ops, product: torch.Tensor) -> Normed:
        return ops.swiglu_in_bytes(product, self.swiglu.activation, self.in_bytes)

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Normed | None:
        made = self.swiglu.fused(ops, x, weight, bias)
        return None if made is None else Normed(made)


@dataclass(frozen=True, slots=True, eq=False)
class AddRMSNorm(Epilogue[Normed]):
    """residual [T, features] += product, in place. The result is the norm of the sum, or without a
    `norm` the sum.

    The product is first normalised by `after`, then multiplied by `scale`.
    """

    residual: torch.Tensor
    norm: Norm | None
    after: Norm | None = None
    scale: float = 1.0

    def apply_to_sum(self, ops: Ops, mesh: Mesh, product: torch.Tensor) -> Normed:
        """`apply` to the sum of all ranks' products."""
        if self.norm is not None and self.after is None and self.scale == 1.0:
            sums = mesh.row_sums(product)
            if sums is not None:
                return ops.add_rms_norm(product, self.residual, self.norm, sums)
        return self.apply(ops, mesh.reduce(product))

    def apply(self, ops: Ops, product: torch.Tensor) -> Normed:
        if self.after is not None:
            product = ops.rms_norm(product, self.after)
        if self.scale != 1.0:
            product.mul_(self.scale)
        if self.norm is None:
            return Normed(self.residual.add_(product))
        return ops.add_rms_norm(product, self.residual, self.norm)

    def fused(
        self, ops: FusedProducts, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Normed | None:
        if self.norm is None or self.norm.centered:
            return None
        if self.after is not None or self.scale != 1.0:
            return None
        return ops.product_add_rms_norm(x, weight, bias, self.residual, self.norm)
