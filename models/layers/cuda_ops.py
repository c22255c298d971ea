"""`Ops` by CUDA kernels: ours for one row and for few, else cuBLAS with ours between its GEMMs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.models.layers.few_rows import FewRows
from asyncllm.models.layers.many_rows import add_rms_norm, rms_norm, swiglu
from asyncllm.models.layers.one_row import one_row_add_linear, one_row_linear
from asyncllm.models.layers.ops import Norm, Normed
from asyncllm.models.layers.products import Products


class CudaOps:
    """In half precision. `products`, `gated_products`: of many rows; None: torch's."""

    def __init__(
        self,
        device: torch.device,
        products: Products | None = None,
        gated_products: Products | None = None,
    ) -> None:
        self._few_rows = FewRows(device)
        self._products = [each for each in (products, gated_products) if each is not None]
        self._linear = F.linear if products is None else products.linear
        self._gated_products = gated_products

    def before_capture(self) -> None:
        for products in self._products:
            products.choose()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> Normed:
        add_rms_norm(x, residual, norm)
        return Normed(x)

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return one_row_linear(x, weight, bias)
        if self._few_rows.takes(x, weight):
            return self._few_rows.linear(x, weight, bias)
        return self._linear(x.whole(), weight, bias)

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if x.values.shape[0] == 1:
            return one_row_linear(x, weight, bias, gated=True)
        if self._few_rows.takes(x, weight):
            return self._few_rows.linear(x, weight, bias, gated=True)
        if self._gated_products is not None:
            return self._gated_products.linear(x.whole(), weight, bias)
        return None

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed | None:
        assert x.squares is None, "what is added to a residual comes from no norm"
        if x.values.shape[0] == 1:
            return one_row_add_linear(x.values, weight, bias, residual, norm)
        if self._few_rows.takes_sum(x.values, weight):
            return self._few_rows.add_linear(x.values, weight, bias, residual, norm)
        return None


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`Ops.product_swiglu`, by torch's GEMM and SwiGLU: what `gated_products` are compared with."""
    return swiglu(F.linear(x, weight, bias))
