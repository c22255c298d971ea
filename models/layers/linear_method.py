"""How a linear layer stores its weights and multiplies by them: the seam for quantization.

A layer owns the tensors that its method creates and hands them back at every call, so one method
serves many layers. A method knows nothing of what else is done to a product: see `Linear`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncllm.models.base import Load
from asyncllm.models.layers.ops import Epilogue, Normed, Ops, Out

Weights = dict[str, torch.Tensor]


def put(weights: Weights, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Keep what was made of weights: in place where an earlier load has made it, as graphs hold its
    address. Returns what is kept."""
    return weights.setdefault(name, tensor).copy_(tensor)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """`parts`: module's name in the checkpoint -> its output features, in the output's order."""

    parts: Mapping[str, int]
    in_features: int
    bias: bool

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())


class LinearMethod(Protocol):
    def create_weights(self, shape: LinearShape) -> Weights:
        """Uninitialised tensors on the target device, under names of the method's own."""
        ...

    def loads(self, shape: LinearShape, weights: Weights) -> Iterator[Load]:
        """All that fills the weights."""
        ...

    def finish(self, weights: Weights) -> None:
        """Repack what was loaded, in place: graphs hold its addresses. Again after a reload."""
        ...

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], a new tensor, with the bias where there is one."""
        ...

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        """The epilogue of the product, by one kernel; None: there is no such kernel."""
        ...


@dataclass(frozen=True, slots=True)
class UnquantizedLinearMethod:
    """Weights in the model's dtype: `weight` [out, in], `bias` [out]; the parts are row ranges."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops

    def create_weights(self, shape: LinearShape) -> Weights:
        sizes = {"weight": (shape.out_features, shape.in_features), "bias": (shape.out_features,)}
        return {
            name: torch.empty(size, dtype=self.dtype, device=self.device)
            for name, size in sizes.items()
            if name != "bias" or shape.bias
        }

    def loads(self, shape: LinearShape, weights: Weights) -> Iterator[Load]:
        for suffix, tensor in weights.items():
            views = tensor.split(list(shape.parts.values()))
            for name, view in zip(shape.parts, views, strict=True):
                yield Load(f"{name}.{suffix}", view)

    def finish(self, weights: Weights) -> None:
        """They are used as they lie in the checkpoint."""

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        return self.ops.product(x, weights["weight"], weights.get("bias"))

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        return epilogue.fused(self.ops, x, weights["weight"], weights.get("bias"))
