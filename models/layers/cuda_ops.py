"""`Ops` by CUDA kernels: of one row and of few ours, else cuBLAS with ours between its products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.models.layers.few_rows import FewRows
from asyncllm.models.layers.many_rows import add_rms_norm, rms_norm, swiglu
from asyncllm.models.layers.one_row import one_row_add_linear, one_row_linear
from asyncllm.models.layers.ops import Norm, Normed
from asyncllm.models.layers.products import Products


class CudaOps:
    """In half precision. `products`: of many rows; None: torch's."""

    def __init__(self, device: torch.device, products: Products | None = None) -> None:
        self._few_rows = FewRows(device)
        self._products = products
        self._linear = F.linear if products is None else products.linear

    def before_capture(self) -> None:
        if self._products is not None:
            self._products.choose()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm)

    def linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return one_row_linear(x, weight, bias)
        if self._few_rows.takes(x, weight):
            return self._few_rows.linear(x, weight, bias)
        return self._linear(x.whole(), weight, bias)

    def gated_linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return one_row_linear(x, weight, bias, gated=True)
        if self._few_rows.takes(x, weight):
            return self._few_rows.linear(x, weight, bias, gated=True)
        return swiglu(self._linear(x.whole(), weight, bias))

    def add_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        if x.shape[0] == 1:
            return one_row_add_linear(x, weight, bias, residual, norm)
        if self._few_rows.takes_sum(x, weight):
            return self._few_rows.add_linear(x, weight, bias, residual, norm)
        y = self._linear(x, weight, bias)
        add_rms_norm(y, residual, norm)
        return Normed(y)
