"""The kernels that a dense decoder needs besides attention.

A model is written once against `Ops`; `TorchOps` is the reference and the CPU path, a CUDA
implementation calls fused kernels. All run without a host synchronisation and with shapes that
depend only on their inputs' shapes, so they may be captured in a CUDA graph.

In the shapes below T is the number of tokens in the step. Tensors share the model's dtype unless
said otherwise, and their last dimension is contiguous; rows may be strided.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ops(Protocol):
    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out], a new tensor."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32, as a new tensor.

        x: [T, size]; weight: [size].
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """In place: residual += x, then x = rms_norm(residual). Both [T, size], no overlap."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, size], from the merged projection [T, 2 * size], gate first."""
        ...
