"""`Ops` on CUDA: our GEMV for one row, our skinny GEMM for a few rows, cuBLAS for more."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from asyncllm.kernels.all_reduce import RowSums
from asyncllm.kernels.experts import kernel as experts_kernel
from asyncllm.kernels.gemm.gemm_autotune import AutotunedGemm
from asyncllm.kernels.gemv.kernel import gemv, gemv_add_norm
from asyncllm.kernels.quant_gemm.matrix import MOST_IN_16_BITS
from asyncllm.kernels.rms_norm.kernel import (
    add_rms_norm,
    add_rms_norm_in_bytes,
    rms_norm,
    swiglu,
    swiglu_in_bytes,
)
from asyncllm.kernels.route import kernel as route_kernel
from asyncllm.kernels.skinny_gemm import SkinnyGemm
from asyncllm.models.layers import torch_ops
from asyncllm.models.layers.ops import (
    SILU,
    Activation,
    ExpertAdapters,
    ExpertWeights,
    Norm,
    Normed,
    Routed,
    Routing,
)


class CudaOps:
    """For half precision. gemm: for many rows; None: torch's."""

    def __init__(self, device: torch.device, gemm: AutotunedGemm | None = None) -> None:
        self._skinny_gemm = SkinnyGemm(device)
        self._gemm = gemm
        self._linear = F.linear if gemm is None else gemm.linear

    def agree(self, least: Callable[[int], int]) -> None:
        self._skinny_gemm.agree(least)

    def before_capture(self) -> None:
        if self._gemm is not None:
            self._gemm.autotune()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm)

    def swiglu(self, x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        return swiglu(x) if activation == SILU else torch_ops.swiglu(x, activation)

    def swiglu_in_bytes(
        self, x: torch.Tensor, activation: Activation, in_bytes: torch.dtype
    ) -> Normed:
        if activation != SILU or len(x) <= MOST_IN_16_BITS[in_bytes]:
            return Normed(self.swiglu(x, activation))
        values, made = swiglu_in_bytes(x, in_bytes)
        return Normed(values, in_bytes=made)

    def experts(
        self,
        x: Normed,
        weights: ExpertWeights,
        routed: Routed,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        if adapters is None and experts_kernel.takes(weights):
            return experts_kernel.experts(x, weights, routed)
        return torch_ops.grouped_experts(x.whole(), weights, routed, adapters)

    def route(
        self,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        routing: Routing,
        slots: torch.Tensor | None = None,
    ) -> Routed:
        takes = route_kernel.takes(routing)
        chosen = route_kernel.route if takes else torch_ops.route
        return chosen(logits, correction, routing, slots)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        sums: RowSums | None = None,
    ) -> Normed:
        if norm.in_bytes is not None and len(x) > MOST_IN_16_BITS[norm.in_bytes]:
            return Normed(x, in_bytes=add_rms_norm_in_bytes(x, residual, norm, sums))
        add_rms_norm(x, residual, norm, sums)
        return Normed(x)

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return gemv(x, weight, bias)
        if self._skinny_gemm.takes(x, weight):
            return self._skinny_gemm.linear(x, weight, bias)
        return self._linear(x.whole(), weight, bias)

    def product_swiglu(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if x.values.shape[0] == 1:
            return gemv(x, weight, bias, gated=True)
        if self._skinny_gemm.takes(x, weight):
            return self._skinny_gemm.linear(x, weight, bias, gated=True)
        return None

    def product_add_rms_norm(
        self,
        x: Normed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed | None:
        assert x.squares is None, "the input of such a GEMM comes from no norm"
        if x.values.shape[0] == 1:
            return gemv_add_norm(x.values, weight, bias, residual, norm)
        # The kernel reads the norm's weight in the model's dtype.
        is_plain = norm.weight.dtype == residual.dtype
        if is_plain and self._skinny_gemm.takes_sum(x.values, weight):
            return self._skinny_gemm.add_linear(x.values, weight, bias, residual, norm)
        return None
