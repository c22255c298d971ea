"""How a linear layer stores its weights and multiplies by them: the interface for quantization.

A layer owns the tensors that its method creates, and passes them to each call, so one method serves
many layers. Adapters and reductions are the layer's: see `Linear`.
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
    """Store a tensor derived from weights; after a reload in place, as graphs have its address.
    Returns the stored tensor."""
    return weights.setdefault(name, tensor).copy_(tensor)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a linear layer: `rows`, ranges of each part's output features; or `columns`,
    a range of input features, where the ranks' outputs are summed and only one `has_bias`."""

    rows: Mapping[str, tuple[slice, ...]] | None = None
    columns: slice | None = None
    has_bias: bool = True


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class LinearShape:
    """parts: name of a module in the checkpoint -> its output features, in the output's order.

    `parts` and `in_features` are the checkpoint's; a rank has a `shard` of them.
    """

    parts: Mapping[str, int]
    in_features: int
    bias: bool
    shard: Shard = WHOLE

    def rows(self, part: str) -> tuple[slice, ...]:
        """The ranges of a part's output features on this rank."""
        return (slice(self.parts[part]),) if self.shard.rows is None else self.shard.rows[part]

    @property
    def sizes(self) -> dict[str, int]:
        """Output features of each part on this rank."""
        return {
            part: sum(len(range(size)[rows]) for rows in self.rows(part))
            for part, size in self.parts.items()
        }

    @property
    def out_features(self) -> int:
        return sum(self.sizes.values())

    @property
    def num_columns(self) -> int:
        """Input features on this rank."""
        return len(range(self.in_features)[self.shard.columns or slice(None)])

    @property
    def has_bias(self) -> bool:
        return self.bias and self.shard.has_bias

    def loads(
        self, part: str, suffix: str, view: torch.Tensor, columns: tuple[slice, ...] = ()
    ) -> Iterator[Load]:
        """Load this rank's shard of a tensor with a row per output of `part` into `view`."""
        name = f"{part}.{suffix}"
        if self.shard.rows is None and not columns:
            yield Load(name, view)
            return
        file_shape = (self.parts[part], *view.shape[1:])
        if columns:
            file_shape = self.parts[part], self.in_features
        ranges = self.rows(part)
        views = view.split([len(range(self.parts[part])[rows]) for rows in ranges])
        for rows, its in zip(ranges, views, strict=True):
            yield Load(name, its, (rows, *columns), file_shape=file_shape)


class LinearMethod(Protocol):
    def create_weights(self, shape: LinearShape) -> Weights:
        """Uninitialised tensors on the target device, under names of the method's own."""
        ...

    def loads(self, shape: LinearShape, weights: Weights) -> Iterator[Load]:
        """The loads that fill the weights."""
        ...

    def finish(self, weights: Weights) -> None:
        """Repack loaded weights in place, as graphs have their addresses. Called after each
        load."""
        return None

    def in_bytes(self, weights: Weights) -> torch.dtype | None:
        """The 8-bit dtype in which it takes many rows (`Norm.in_bytes`); None: it takes 16 bits."""
        return None

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], a new tensor, including the bias."""
        ...

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        """The product and its epilogue in one kernel; None: there is no such kernel."""
        ...


@dataclass(frozen=True, slots=True)
class UnquantizedLinearMethod(LinearMethod):
    """Weights in the model's dtype: `weight` [out, in], `bias` [out]; parts are ranges of rows."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops

    def create_weights(self, shape: LinearShape) -> Weights:
        sizes = {"weight": (shape.out_features, shape.num_columns), "bias": (shape.out_features,)}
        return {
            name: torch.empty(size, dtype=self.dtype, device=self.device)
            for name, size in sizes.items()
            if name != "bias" or shape.has_bias
        }

    def loads(self, shape: LinearShape, weights: Weights) -> Iterator[Load]:
        columns = () if shape.shard.columns is None else (shape.shard.columns,)
        views = weights["weight"].split(list(shape.sizes.values()))
        for part, view in zip(shape.parts, views, strict=True):
            yield from shape.loads(part, "weight", view, columns)
        yield from bias_loads(shape, weights)

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        return self.ops.product(x, weights["weight"], weights.get("bias"))

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        return epilogue.fused(self.ops, x, weights["weight"], weights.get("bias"))


def bias_loads(shape: LinearShape, weights: Weights) -> Iterator[Load]:
    """Load the bias, if there is one. A rank without it expects its tensors, but reads nothing."""
    if shape.has_bias:
        views = weights["bias"].split(list(shape.sizes.values()))
        for part, view in zip(shape.parts, views, strict=True):
            yield from shape.loads(part, "bias", view)
    elif shape.bias:
        nothing = torch.empty(0, device=weights["weight"].device)  # of any float dtype
        for part, size in shape.parts.items():
            yield Load(f"{part}.bias", nothing, (slice(0),), file_shape=(size,))
