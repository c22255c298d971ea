"""`Ops` in plain torch: the CPU path and the reference that kernels are tested against.

Rounding follows transformers' models: in bfloat16 and float16 the norm is computed in float32 and
rounded before the multiplication by its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.attention.heads import inverse_rms, rms_norm
from asyncllm.models.layers.ops import Norm, Normed


class TorchOps:
    """Stateless. Works in place where it can: on a CPU a large new tensor costs more than its
    arithmetic."""

    def before_capture(self) -> None:
        """Nothing is chosen here."""

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert x.squares is None, "only what the kernel for one row made has a factor to come"
        return F.linear(x.values, weight, bias)

    def gated_linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate, up = self.linear(x, weight, bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def add_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        y = F.linear(x, weight, bias)
        residual32 = residual.add_(y).float()
        torch.mul(residual32, inverse_rms(residual32, norm.eps), out=y)
        return Normed(y.mul_(norm.weight))
