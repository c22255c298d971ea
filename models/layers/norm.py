"""RMSNorm, or a layer norm without bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.ops import Norm


class RMSNorm:
    """constants: for GEMMs that are fused with it.

    offset: added to the file's weight; None: rounding as in Llama. `Norm` documents it, and
    `centered`.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        build: Build,
        offset: float | None = None,
        centered: bool = False,
    ) -> None:
        self._name = f"{name}.weight"
        self._ops = build.ops
        self._offset = offset
        self.constants = Norm(norm_weight(size, build, offset), eps, centered)

    def feed(self, in_bytes: torch.dtype | None) -> None:
        """Set the 8-bit dtype in which the only GEMM that takes its output wants many rows."""
        self.constants = replace(self.constants, in_bytes=in_bytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size], a new tensor."""
        return self._ops.rms_norm(x, self.constants)

    def loads(self) -> Iterator[Load]:
        yield load_norm(self._name, self.constants.weight, self._offset)


def norm_weight(size: int | tuple[int, ...], build: Build, offset: float | None) -> torch.Tensor:
    """An uninitialised weight; in float32 with an offset, as 1 + w needs more precision."""
    dtype = build.dtype if offset is None else torch.float32
    return torch.empty(size, dtype=dtype, device=build.device)


def load_norm(name: str, weight: torch.Tensor, offset: float | None) -> Load:
    if not offset:
        return Load(name, weight)
    return Load(name, weight, transform=lambda loaded: loaded.float() + offset)
