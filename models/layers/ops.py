"""The kernels that a dense decoder needs besides attention.

A model is written once against `Ops`; `TorchOps` is the reference and the CPU path, a CUDA
implementation calls fused kernels. All run without a host synchronisation and with shapes that
depend only on their inputs' shapes, so they may be captured in a CUDA graph.

In the shapes below T is the number of tokens in the step. Tensors share the model's dtype unless
said otherwise, and are contiguous.
"""

from __future__ import annotations

from typing import Protocol

import torch

from asyncllm.kernels.records import Norm as Norm
from asyncllm.kernels.records import Normed as Normed


class Ops(Protocol):
    def before_capture(self) -> None:
        """Settle what is still open about the calls since the last one; they will be captured."""
        ...

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32: [T, size], new."""
        ...

    def linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out], a new tensor."""
        ...

    def gated_linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """silu(gate) * up, where gate and up are the halves of `linear`'s output: [T, out / 2]."""
        ...

    def add_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        """In place: residual [T, out] += x [T, in] times weight. Returns the norm of the sum."""
        ...
