"""What every layer of one model is made with: where, in which dtype, with which kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.models.layers.linear_method import LinearMethod
from asyncllm.models.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Build:
    """`max_model_len` is the number of positions the model must know, in tokens."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    linear_method: LinearMethod
    max_model_len: int

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
