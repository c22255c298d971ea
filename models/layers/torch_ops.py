"""`Ops` in plain torch: the CPU path and the reference that kernels are tested against.

Rounding follows transformers' models: in bfloat16 and float16 the norm is computed in float32 and
rounded before the multiplication by its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.attention.heads import inverse_rms, rms_norm
from asyncllm.models.layers.ops import Norm, Normed, Ops


class TorchOps(Ops):
    """Stateless and unfused. Works in place where it can: on a CPU a large new tensor costs more
    than its arithmetic."""

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> Normed:
        residual32 = residual.add_(x).float()
        torch.mul(residual32, inverse_rms(residual32, norm.eps), out=x)
        return Normed(x.mul_(norm.weight))

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert x.squares is None, "only a fused kernel leaves a factor to its successor"
        return F.linear(x.values, weight, bias)
