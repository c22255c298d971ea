"""`Ops` on the meta device that record which GEMVs a step of one row needs.

Building a model with them and running it once shows which variants of the GEMV its first step will
launch, without weights and without knowledge of its layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from asyncllm.kernels.all_reduce import RowSums
from asyncllm.kernels.declaration import RowProduct
from asyncllm.kernels.gemv.tiles import num_squares
from asyncllm.models.layers.ops import SILU, Activation, Norm, Normed
from asyncllm.models.layers.torch_ops import TorchOps


class WithoutLookups(TorchFunctionMode):
    """Replaces embedding look-ups on the meta device, where torch's code imports 500 modules."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        ids, weight = args
        return weight.new_empty((*ids.shape, weight.shape[1]))


class OneRowOps(TorchOps):
    """Returns what `CudaOps` does for one row of a plain dense decoder, without memory. It uses
    new_empty, as empty_like has expensive imports on the meta device. products: each one once."""

    def __init__(self) -> None:
        self._noted: dict[RowProduct, None] = {}

    @property
    def products(self) -> tuple[RowProduct, ...]:
        return tuple(self._noted)

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return x.new_empty(x.shape)

    def swiglu(self, x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        return x.new_empty((len(x), x.shape[1] // 2))

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        sums: RowSums | None = None,
    ) -> Normed:
        return Normed(x)

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._note(x, weight, bias)
        return x.values.new_empty((1, len(weight)))

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self._note(x, weight, bias, gated=True)
        return x.values.new_empty((1, len(weight) // 2))

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        self._note(x, weight, bias, norm_dtype=norm.weight.dtype)
        squares = residual.new_empty((1, num_squares(weight)), dtype=torch.float32)
        return Normed(residual.new_empty(residual.shape), squares, norm.eps)

    def _note(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
        norm_dtype: torch.dtype | None = None,
    ) -> None:
        features = len(weight) // 2 if gated else len(weight)
        squares = 0 if x.squares is None else x.squares.shape[1]
        product = RowProduct(
            *(weight.shape[1], features), bias is not None, gated, squares, norm_dtype
        )
        self._noted[product.with_few_features()] = None
