"""A linear layer, merged or not: several projections of one input are one matrix product.

The layer knows the checkpoint names of its parts, and its method which rows each fills, so loading
is a copy into a view and no weight is ever concatenated:

    weight [out, in]   rows 0..q         q_proj.weight
                       rows q..q+kv      k_proj.weight
                       rows q+kv..q+2kv  v_proj.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.linear_method import (
    WHOLE,
    LinearShape,
    Shard,
    UnquantizedLinearMethod,
)
from asyncllm.models.layers.ops import Delta, Epilogue, Normed, Out


class Linear:
    """`parts`: name below `prefix` -> output features, in the order of the output.

    Where ranks share the model each has all of the product, or those `rows`, ranges of each part's
    output features, or of those `columns`, a range of the input features.
    """

    def __init__(
        self,
        prefix: str,
        parts: Mapping[str, int],
        in_features: int,
        bias: bool,
        build: Build,
        *,
        rows: Mapping[str, tuple[slice, ...]] | None = None,
        columns: slice | None = None,
    ) -> None:
        names = {f"{prefix}.{part}": size for part, size in parts.items()}
        shard, self._reduce = WHOLE, None
        if build.mesh.config.tp > 1 and columns is not None:
            shard = Shard(columns=columns, has_bias=build.mesh.config.place == 0)
            self._reduce = build.mesh.reduce
        elif build.mesh.config.tp > 1 and rows is not None:
            shard = Shard({f"{prefix}.{part}": ranges for part, ranges in rows.items()})
        self._shape = LinearShape(names, in_features, bias, shard)
        self._method, *others = map(build.method_for, names)
        if any(other is not self._method for other in others):
            raise ModelLoadError(
                f"{prefix}: {', '.join(parts)} are one product, but not quantised alike"
            )
        self._ops = build.ops
        self._rows: dict[str, torch.Tensor] = {}
        self.weights = self._method.create_weights(self._shape)
        self._lora = None if build.lora is None else build.lora.layer(self._shape)
        if self._lora is not None:
            is_plain = isinstance(self._method, UnquantizedLinearMethod)
            known = {"weight", "bias"} if is_plain else {"bias"}
            self._lora.base = {n: w for n, w in self.weights.items() if n in known}

    def reorder(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Load output i of these parts from the checkpoint's rows[part][i]: int64 on the CPU.

        Only for weights that lie as in the checkpoint, a row for each output.
        """
        if not isinstance(self._method, UnquantizedLinearMethod):
            raise NotImplementedError(f"the outputs of {type(self._method).__name__} in an order")
        self._rows.update(rows)
        if self._lora is not None:
            self._lora.orders.update(rows)

    @property
    def in_bytes(self) -> torch.dtype | None:
        return self._method.in_bytes(self.weights)

    def __call__(self, x: Normed) -> torch.Tensor:
        """The product: [T, in_features] -> [T, sum of the parts' features], and its adapters'. Of
        columns it is this rank's summand."""
        delta = self._delta(x)
        product = self._method.product(self.weights, x)
        return product if delta is None else delta.add(product)

    def with_epilogue(self, x: Normed, epilogue: Epilogue[Out]) -> Out:
        """The epilogue of the product, by one kernel where the method has one and nothing comes
        between the two."""
        if self._reduce is not None:
            return epilogue.apply(self._ops, self._reduce(self(x)))
        if (delta := self._delta(x)) is not None:
            product = self._method.product(self.weights, x)
            return epilogue.apply_adapted(self._ops, product, delta)
        fused = self._method.fused(self.weights, x, epilogue)
        return epilogue.apply(self._ops, self(x)) if fused is None else fused

    def _delta(self, x: Normed) -> Delta | None:
        return None if self._lora is None else self._lora.delta(x.values)

    def loads(self) -> Iterator[Load]:
        for load in self._method.loads(self._shape, self.weights):
            rows = self._rows.get(load.name.rpartition(".")[0])
            yield load if rows is None else _reordered(load, rows)

    def finish_loading(self) -> None:
        self._method.finish(self.weights)


def _reordered(load: Load, rows: torch.Tensor) -> Load:
    """Load a range of outputs by that range of the order, from anywhere in the tensor."""
    own = rows[load.part[0]] if load.part else rows
    return replace(load, part=(), transform=_take(own))


def _take(rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda loaded: loaded[rows.to(loaded.device)]
