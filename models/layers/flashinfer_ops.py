"""`Ops` by CUDA kernels: FlashInfer's (public calls only, tested with 0.6.12), cuBLAS, ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.attention.flashinfer_import import flashinfer
from asyncllm.models.layers.gemv import gemv


class FlashInferOps:
    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[0] == 1:
            return gemv(x, weight, bias)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return flashinfer.norm.rmsnorm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        flashinfer.norm.fused_add_rmsnorm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return flashinfer.activation.silu_and_mul(gate_up)
