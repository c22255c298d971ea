"""RMSNorm, or a layer norm without bias, with its name in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.ops import Norm


class RMSNorm:
    """`constants` are for the matrix products that end or begin with it.

    `offset` is added to the file's weight; None: Llama's rounding (see `Norm`, of `centered` too).
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
        """Say how the one product that its output is for takes many rows (`LinearMethod`)."""
        self.constants = replace(self.constants, in_bytes=in_bytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> the same shape, a new tensor."""
        return self._ops.rms_norm(x, self.constants)

    def loads(self) -> Iterator[Load]:
        yield load_norm(self._name, self.constants.weight, self._offset)


def norm_weight(size: int | tuple[int, ...], build: Build, offset: float | None) -> torch.Tensor:
    """Uninitialised. 1 + w has more digits than a half-precision type holds."""
    dtype = build.dtype if offset is None else torch.float32
    return torch.empty(size, dtype=dtype, device=build.device)


def load_norm(name: str, weight: torch.Tensor, offset: float | None) -> Load:
    if not offset:
        return Load(name, weight)
    return Load(name, weight, transform=lambda loaded: loaded.float() + offset)
