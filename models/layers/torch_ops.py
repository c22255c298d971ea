"""`Ops` in plain torch: the CPU path and the reference that kernels are tested against.

Rounding follows transformers' models: in bfloat16 and float16 the norm is computed in float32 and
rounded before the multiplication by its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.attention.heads import inverse_rms, rms_norm


class TorchOps:
    """Stateless. Works in place where it can: on a CPU a large new tensor costs more than its
    arithmetic."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        residual32 = residual.add_(x).float()
        torch.mul(residual32, inverse_rms(residual32, eps), out=x)
        x.mul_(weight)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
