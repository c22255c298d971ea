"""`Ops` in plain torch: the CPU path and the reference that kernels are tested against.

Rounding follows transformers' models: in bfloat16 and float16 the norm is computed in float32 and
rounded before the multiplication by its weight. The one difference: the rotation stays in float32
until its result is rounded (as CUDA kernels do), where transformers rounds cosine and sine first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchOps:
    """Stateless. Works in place where it can: on a CPU a large new tensor costs more than its
    arithmetic."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        return (x32 * _inverse_rms(x32, eps)).to(x.dtype).mul_(weight)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        residual32 = residual.add_(x).float()
        torch.mul(residual32, _inverse_rms(residual32, eps), out=x)
        x.mul_(weight)

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        half = cos_sin.shape[-1] // 2
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).split(half, dim=-1)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # [T, 1, 2 * half]
        for heads in (q, k):
            rotated = heads[..., : 2 * half]
            x = rotated.float()
            rotated.copy_((x * cos).addcmul_(x.roll(half, dims=-1), sin))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept: [..., size] -> [..., 1], float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
