"""`Ops` by FlashInfer's CUDA kernels. Public calls only; tested with FlashInfer 0.6.12."""

from __future__ import annotations

import torch

from asyncllm.attention.flashinfer_import import flashinfer


class FlashInferOps:
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return flashinfer.norm.rmsnorm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        flashinfer.norm.fused_add_rmsnorm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return flashinfer.activation.silu_and_mul(gate_up)
