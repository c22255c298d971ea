"""Quantised experts: all of a layer's in one form, and a product with each by a kernel.

    gate_up.*   the form (scheme.py) of [experts * 2 * size, hidden_size], an expert's gates before
                its ups
    down.*      that of [experts * hidden_size, size]

What fills them follows from the family's own list for 16 bits: the rows that a tensor fills there
are those that its quantised tensors fill here. Inputs stay in 16 bits, whatever a checkpoint says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.base import Load
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.linear_method import Weights
from asyncllm.models.layers.ops import ExpertAdapters, ExpertWeights, Normed, Routed
from asyncllm.models.layers.torch_ops import grouped_experts
from asyncllm.models.quantization.cpu_experts import dequantized
from asyncllm.models.quantization.method import Reader, Source, source_load
from asyncllm.models.quantization.scheme import Scheme


class ExpertsKernel(Protocol):
    """Products with one layer's experts on one device.

    columns_multiple: to which the columns of codes of four bits are filled up in memory.
    """

    columns_multiple: int

    def prepare(self, scheme: Scheme, shape: ExpertsShape, weights: Weights) -> None:
        """Add to `weights` what products need besides the form; again after a reload, in place."""
        ...

    def apply(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, x: Normed, routed: Routed
    ) -> torch.Tensor:
        """As `Ops.experts`."""
        ...


@dataclass(frozen=True, slots=True)
class FamilyLoads:
    """A family's list of what fills its experts in 16 bits, and those weights without memory."""

    weights: ExpertWeights
    loads: list[Load]

    @classmethod
    def of(cls, name: str, shape: ExpertsShape, dtype: torch.dtype) -> FamilyLoads:
        experts, hidden, size = shape.num_experts, shape.hidden_size, shape.size

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=dtype, device="meta")

        gate_up, down = empty(experts, 2 * size, hidden), empty(experts, hidden, size)
        gate_up_bias = empty(experts, 2 * size) if shape.bias else None
        down_bias = empty(experts, hidden) if shape.bias else None
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, shape.activation)
        return cls(weights, list(shape.load(name, weights, shape.share(MeshConfig()))))

    def target(self, load: Load) -> str:
        """The name of the weight of which a load fills a part."""
        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            weight = getattr(self.weights, name)
            if weight is not None and _same_storage(weight, load.view):
                return name
        raise AssertionError(f"{load.name} fills no weight of experts")

    @property
    def layers(self) -> list[str]:
        """The checkpoint's names of all that is multiplied by."""
        return [_layer(load) for load in self.loads if not self.target(load).endswith("bias")]


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _layer(load: Load) -> str:
    return load.name.removesuffix(".weight")


def _checked_only(source: Source) -> Source:
    """Read what is not used, for the sake of its checks."""
    convert = source.convert
    assert convert is not None

    def check(tensor: torch.Tensor) -> list[torch.Tensor]:
        convert(tensor)
        return []

    return replace(source, fields=(), convert=check)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedExpertsMethod:
    """dtype: the model's, of scales, offsets and biases in memory."""

    reader: Reader
    kernel: ExpertsKernel
    dtype: torch.dtype
    device: torch.device

    @property
    def scheme(self) -> Scheme:
        return replace(self.reader.scheme, activations=None)

    def create_weights(self, shape: ExpertsShape) -> Weights:
        experts, hidden, size = shape.num_experts, shape.hidden_size, shape.size
        made: Weights = {}
        for product, rows, columns in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
            for field, each, dtype in self._form(experts * rows, columns, shape.bias):
                # Zeros, as no tensor of a file fills the columns that are added.
                made[f"{product}.{field}"] = torch.zeros(each, dtype=dtype, device=self.device)
        return made

    def _form(
        self, rows: int, columns: int, bias: bool
    ) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        scheme, padded = self.scheme, columns
        if scheme.bits == 4:
            padded = -(-columns // self.kernel.columns_multiple) * self.kernel.columns_multiple
        groups = scheme.num_groups(padded if scheme.has_exponents else columns)
        scale_dtype = scheme.scale_dtype(self.dtype)
        yield "weight", (rows, padded * scheme.bits // 8), scheme.dtype
        yield "scale", (rows, groups), scale_dtype
        if scheme.has_offset:
            yield "offset", (rows, groups), scale_dtype
        if bias:
            yield "bias", (rows,), self.dtype

    def loads(self, name: str, shape: ExpertsShape, weights: Weights) -> Iterator[Load]:
        if self.scheme.has_order:
            raise ModelLoadError(f"{name}: desc_act true is not served of experts")
        family = FamilyLoads.of(name, shape, self.dtype)
        for load in family.loads:
            target, columns = family.target(load), load.view.shape[-1]
            product, first = target.removesuffix("_bias"), load.view.storage_offset()
            if target.endswith("bias"):
                own = weights[f"{product}.bias"][first : first + load.view.numel()]
                yield replace(load, view=own.view(load.view.shape))
                continue
            first, rows = first // columns, load.view.numel() // columns
            for source in self._sources(load, rows, columns):
                views = [
                    weights[f"{product}.{field}"][
                        first : first + rows, : self._width(field, columns)
                    ]
                    for field in source.fields
                ]
                yield source_load(_layer(load), source, views, self.device)

    def _width(self, field: str, columns: int) -> int:
        """The columns in memory of a weight, or of its scales, that a file fills."""
        scheme = self.scheme
        return columns * scheme.bits // 8 if field == "weight" else scheme.num_groups(columns)

    def _sources(self, load: Load, rows: int, columns: int) -> Iterator[Source]:
        if load.view.dim() == 3:  # several experts
            if self.reader.stacked is None:
                raise ModelLoadError(
                    f"{load.name}: experts in one tensor are not served in this format"
                )
            yield from self.reader.stacked(load)
            return
        for source in self.reader.sources(_layer(load), rows, columns):
            yield _checked_only(source) if source.fields == ("input_scale",) else source

    def finish(self, shape: ExpertsShape, weights: Weights) -> None:
        self.kernel.prepare(self.scheme, shape, weights)

    def apply(
        self,
        shape: ExpertsShape,
        weights: Weights,
        x: Normed,
        routed: Routed,
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        if adapters is not None:  # which come between the products
            all_experts = dequantized(self.scheme, shape, weights, x.values.dtype)
            return grouped_experts(x.whole(), all_experts, routed, adapters)
        return self.kernel.apply(self.scheme, shape, weights, x, routed)
