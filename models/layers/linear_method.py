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
class Shard:
    """The part of a product that one rank computes. Either `rows`: of each part the ranges of its
    output features; or `columns`, a range of the input features: the ranks' products are then
    summed, and only one of them `has_bias`."""

    rows: Mapping[str, tuple[slice, ...]] | None = None
    columns: slice | None = None
    has_bias: bool = True


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class LinearShape:
    """`parts`: module's name in the checkpoint -> its output features, in the output's order.

    These and `in_features` are the checkpoint's; a rank has the `shard` of them.
    """

    parts: Mapping[str, int]
    in_features: int
    bias: bool
    shard: Shard = WHOLE

    def rows(self, part: str) -> tuple[slice, ...]:
        """The ranges of a part's output features that are computed here."""
        return (slice(self.parts[part]),) if self.shard.rows is None else self.shard.rows[part]

    @property
    def sizes(self) -> dict[str, int]:
        """Output features of each part here."""
        return {
            part: sum(len(range(size)[rows]) for rows in self.rows(part))
            for part, size in self.parts.items()
        }

    @property
    def out_features(self) -> int:
        return sum(self.sizes.values())

    @property
    def num_columns(self) -> int:
        """Input features here."""
        return len(range(self.in_features)[self.shard.columns or slice(None)])

    @property
    def has_bias(self) -> bool:
        return self.bias and self.shard.has_bias

    def loads(
        self, part: str, suffix: str, view: torch.Tensor, columns: tuple[slice, ...] = ()
    ) -> Iterator[Load]:
        """Load to `view` this rank's share of a tensor with a row for each of a part's outputs."""
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
        """All that fills the weights."""
        ...

    def finish(self, weights: Weights) -> None:
        """Repack what was loaded, in place: graphs hold its addresses. Again after a reload."""
        ...

    def in_bytes(self, weights: Weights) -> torch.dtype | None:
        """`Norm.in_bytes` of a norm whose only product this is."""
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

    def finish(self, weights: Weights) -> None:
        """They are used as they lie in the checkpoint."""

    def in_bytes(self, weights: Weights) -> torch.dtype | None:
        return None

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        return self.ops.product(x, weights["weight"], weights.get("bias"))

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        return epilogue.fused(self.ops, x, weights["weight"], weights.get("bias"))


def bias_loads(shape: LinearShape, weights: Weights) -> Iterator[Load]:
    """Load the bias, if there is one. A rank that has none of it reads nothing, but knows of it."""
    if shape.has_bias:
        views = weights["bias"].split(list(shape.sizes.values()))
        for part, view in zip(shape.parts, views, strict=True):
            yield from shape.loads(part, "bias", view)
    elif shape.bias:
        nothing = torch.empty(0, device=weights["weight"].device)  # any float is as good
        for part, size in shape.parts.items():
            yield Load(f"{part}.bias", nothing, (slice(0),), file_shape=(size,))
