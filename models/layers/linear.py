"""A linear layer, possibly merged: several projections of the same input as one GEMM.

The layer knows the names of its parts in the checkpoint, and its method the rows that each part
fills. So loading copies into views, and weights are never concatenated:

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
from asyncllm.models.layers.ops import AddRMSNorm, Delta, Epilogue, Normed, Out


class Linear:
    """parts: name below `prefix` -> output features, in the order of the output.

    With tensor parallelism a rank has the `rows`, ranges of each part's output features, or the
    `columns`, a range of input features, or with neither the whole layer.
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
        shard, self._summing = WHOLE, None
        if build.mesh.config.tp > 1 and columns is not None:
            shard = Shard(columns=columns, has_bias=build.mesh.config.place == 0)
            self._summing = build.mesh
        elif build.mesh.config.tp > 1 and rows is not None:
            shard = Shard({f"{prefix}.{part}": ranges for part, ranges in rows.items()})
        self._shape = LinearShape(names, in_features, bias, shard)
        self.method, *others = map(build.method_for, names)
        if any(other is not self.method for other in others):
            raise ModelLoadError(
                f"{prefix}: {', '.join(parts)} are one product, but not quantised alike"
            )
        self._ops = build.ops
        self._rows: dict[str, torch.Tensor] = {}
        self.weights = self.method.create_weights(self._shape)
        self._lora = None if build.lora is None else build.lora.layer(self._shape)
        self._adapted_weights = self.weights  # of products that adapters are added to
        if self._lora is not None:
            is_plain = isinstance(self.method, UnquantizedLinearMethod)
            known = {"weight", "bias"} if is_plain else {"bias"}
            if is_plain:
                self._adapted_weights = self._lora.extend(self.weights)
            self._lora.base = {n: w for n, w in self.weights.items() if n in known}

    def reorder(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Load output i of these parts from row rows[part][i] of the checkpoint. rows: int64, on
        the CPU.

        Only for unquantized weights, which have a row per output.
        """
        if not isinstance(self.method, UnquantizedLinearMethod):
            raise NotImplementedError(f"the outputs of {type(self.method).__name__} in an order")
        self._rows.update(rows)
        if self._lora is not None:
            self._lora.orders.update(rows)

    @property
    def in_bytes(self) -> torch.dtype | None:
        return self.method.in_bytes(self.weights)

    def __call__(self, x: Normed) -> torch.Tensor:
        """[T, in_features] -> [T, output features of all parts], including adapters. With `columns`
        it is this rank's summand."""
        if (delta := self._delta(x)) is not None:
            return delta.add(self.method.product(self._adapted_weights, x))
        return self.method.product(self.weights, x)

    def with_epilogue(self, x: Normed, epilogue: Epilogue[Out]) -> Out:
        """The GEMM and its epilogue, in one kernel if the method has one and neither a reduction
        nor adapters come in between."""
        if (delta := self._delta(x)) is not None:
            product = self.method.product
            return epilogue.apply_adapted(self._ops, product(self._adapted_weights, x), delta)
        fused = self.method.fused(self.weights, x, epilogue)
        return epilogue.apply(self._ops, self(x)) if fused is None else fused

    def _delta(self, x: Normed) -> Delta | None:
        return None if self._lora is None else self._lora.delta(x.values)

    def add(self, x: Normed, end: AddRMSNorm) -> Normed:
        """`with_epilogue`, of the sum of all ranks' products where each has some columns."""
        if self._summing is None:
            return self.with_epilogue(x, end)
        return end.apply_to_sum(self._ops, self._summing, self(x))

    def loads(self) -> Iterator[Load]:
        for load in self.method.loads(self._shape, self.weights):
            rows = self._rows.get(load.name.rpartition(".")[0])
            yield load if rows is None else _reordered(load, rows)

    def finish_loading(self) -> None:
        self.method.finish(self.weights)


def _reordered(load: Load, rows: torch.Tensor) -> Load:
    """Load outputs in another order: from any rows of the file's tensor."""
    own = rows[load.part[0]] if load.part else rows
    return replace(load, part=(), transform=_take(own))


def _take(rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda loaded: loaded[rows.to(loaded.device)]
