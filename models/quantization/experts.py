"""Quantised experts: storage, loading and products. All experts of a layer share tensors.

    gate_up.*   [experts * 2 * size, hidden_size] as scheme.py stores it; an expert's gate rows come
                before its up rows
    down.*      [experts * hidden_size, size]

The family's list of `Load`s for 16-bit experts tells which rows a quantised tensor fills. A rank
keeps its own rows of what a reader makes of a tensor, and does not read tensors of other ranks'
experts. Inputs stay in 16 bits, whatever the checkpoint says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.base import Load
from asyncllm.models.layers.experts_method import ExpertsShape, ExpertsShare
from asyncllm.models.layers.linear_method import Weights
from asyncllm.models.layers.ops import ExpertAdapters, ExpertWeights, Normed, Routed
from asyncllm.models.layers.torch_ops import grouped_experts
from asyncllm.models.quantization.cpu_experts import PRODUCTS
from asyncllm.models.quantization.method import (
    Reader,
    Source,
    check_columns,
    converted,
    named,
    place_of_columns,
    source_load,
)
from asyncllm.models.quantization.scheme import Scheme


class ExpertsKernel(Protocol):
    """Products with a layer's experts on one device.

    columns_multiple: the columns of 4-bit codes are padded to a multiple of this in memory.
    """

    columns_multiple: int

    def prepare(self, scheme: Scheme, shape: ExpertsShape, weights: Weights) -> None:
        """Add derived tensors that products need to `weights`; after a reload in place."""
        ...

    def apply(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, x: Normed, routed: Routed
    ) -> torch.Tensor:
        """As `Ops.experts`."""
        ...

    def dequantized(
        self, scheme: Scheme, shape: ExpertsShape, weights: Weights, dtype: torch.dtype
    ) -> ExpertWeights:
        """All experts in the model's dtype. weights: prepared ones."""
        ...


@dataclass(frozen=True, slots=True)
class FamilyLoads:
    """A family's loads of its 16-bit experts, and these weights on the meta device."""

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
        """The name of the weight that a load fills, or a part of it."""
        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            weight = getattr(self.weights, name)
            if weight is not None and _same_storage(weight, load.view):
                return name
        raise AssertionError(f"{load.name} fills no weight of experts")

    @property
    def layers(self) -> list[str]:
        """The checkpoint's names of all matrices."""
        return [_layer(load) for load in self.loads if not self.target(load).endswith("bias")]


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _layer(load: Load) -> str:
    return load.name.removesuffix(".weight")


def _checked_only(source: Source) -> Source:
    """A source that is only read for its checks."""
    convert = source.convert
    assert convert is not None

    def check(tensor: torch.Tensor) -> list[torch.Tensor]:
        convert(tensor)
        return []

    return replace(source, fields=(), convert=check)


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """A rank's part of a matrix of all experts: some of its rows, ascending, and some columns."""

    experts: range  # the ones to read from a tensor of several experts
    rows: torch.Tensor
    columns: slice
    is_whole: bool

    @classmethod
    def of(cls, product: str, shape: ExpertsShape, share: ExpertsShare) -> OwnRows:
        hidden = slice(0, shape.hidden_size)
        rows, columns = (hidden, share.size) if product == "down" else (share.size, hidden)
        num_rows = shape.hidden_size if product == "down" else 2 * shape.size  # gates before ups
        every = torch.arange(shape.num_experts * num_rows)
        parts = every.view(shape.num_experts, 1 if product == "down" else 2, -1)
        own = parts[share.experts, :, rows].flatten()
        return cls(range(shape.num_experts)[share.experts], own, columns, share.is_whole)

    def among(self, first: int, num_rows: int) -> tuple[torch.Tensor, slice]:
        """This rank's share of the `num_rows` rows from `first` on: their indices among these, and
        their place in the matrix of the rank."""
        ends = torch.tensor([first, first + num_rows])
        start, stop = torch.searchsorted(self.rows, ends).tolist()
        return self.rows[start:stop] - first, slice(start, stop)

    def part(self, source: Source, read: torch.Tensor, columns: int) -> tuple[slice, ...] | None:
        """The slices of an expert's tensor that hold the rows `read`, from `among`; None: they
        cannot be read alone. columns: of the whole matrix."""
        rows = range(int(read[0]), int(read[-1]) + 1)
        if source.matrix is None or len(rows) > len(read):
            return None
        return source.matrix.part(rows, None if self.columns == slice(0, columns) else self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedExpertsMethod:
    """dtype: the model's, of scales, offsets and biases in memory."""

    reader: Reader
    kernel: ExpertsKernel
    dtype: torch.dtype
    device: torch.device
    mesh: MeshConfig

    @property
    def scheme(self) -> Scheme:
        return replace(self.reader.scheme, activations=None)

    def create_weights(self, shape: ExpertsShape) -> Weights:
        own, has_down_bias = shape.own(self.mesh, self.dtype), shape.share(self.mesh).has_down_bias
        experts, hidden, size = own.num_experts, own.hidden_size, own.size
        made: Weights = {}
        for product, rows, columns, bias in (
            ("gate_up", 2 * size, hidden, shape.bias),
            ("down", hidden, size, shape.bias and has_down_bias),
        ):
            for field, each, dtype in self._form(experts * rows, columns, bias):
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
        share = shape.share(self.mesh)
        if share.size != slice(0, shape.size):
            check_columns(self.scheme, f"{name}: down_proj", share.size, shape.size)
        family = FamilyLoads.of(name, shape, self.dtype)
        own = {product: OwnRows.of(product, shape, share) for product in PRODUCTS}
        for load in family.loads:
            target = family.target(load)
            product = target.removesuffix("_bias")
            if target == product:
                yield from self._product_loads(load, product, own[product], weights)
            else:
                yield self._bias_load(load, product, own[product], weights)

    def _bias_load(self, load: Load, product: str, own: OwnRows, weights: Weights) -> Load:
        read, place = own.among(int(load.view.storage_offset()), load.view.numel())
        if f"{product}.bias" not in weights or not len(read):
            file_shape = load.file_shape or tuple(load.view.shape)
            return self._unread(load.name, file_shape, load.view.dtype)
        view = weights[f"{product}.bias"][place]
        if own.is_whole:
            return replace(load, view=view.view(load.view.shape))

        def convert(bias: torch.Tensor) -> torch.Tensor:
            ordered = bias if load.transform is None else load.transform(bias)
            return ordered.flatten()[read.to(bias.device)]

        file_shape = load.file_shape or tuple(load.view.shape)
        return replace(load, view=view, transform=convert, file_shape=file_shape)

    def _product_loads(
        self, load: Load, product: str, own: OwnRows, weights: Weights
    ) -> Iterator[Load]:
        columns = load.view.shape[-1]
        first, num_rows = int(load.view.storage_offset()) // columns, load.view.numel() // columns
        sources = self._sources(load, num_rows, columns)
        of_file: tuple[slice, ...] = ()
        if load.view.dim() == 3 and not own.is_whole:
            each = load.view.shape[1]
            first, num_rows = own.experts.start * each, len(own.experts) * each
            of_file = (slice(own.experts.start, own.experts.stop),)
        read, place = own.among(first, num_rows)

        def cut(field: str, made: torch.Tensor) -> torch.Tensor:
            columns = place_of_columns(self.scheme, field, own.columns)
            return made[read.to(made.device), columns]

        for source in sources:
            if not len(read):
                yield self._unread(named(_layer(load), source), source.shape, source.dtype)
                continue
            views = [
                weights[f"{product}.{field}"][place, : self._width(field, own.columns)]
                for field in source.fields
            ]
            part = of_file
            if source.fields and not own.is_whole:
                if (of_matrix := own.part(source, read, columns)) is not None:
                    part = of_matrix
                else:
                    source = converted(source, cut)
            yield replace(source_load(_layer(load), source, views, self.device), part=part)

    def _unread(self, name: str, file_shape: tuple[int, ...], dtype: torch.dtype) -> Load:
        """A tensor of another rank: expected in the file, but not read."""
        if not file_shape:
            return Load(name, torch.empty((), dtype=dtype, device=self.device))
        nothing = torch.empty((0, *file_shape[1:]), dtype=dtype, device=self.device)
        return Load(name, nothing, (slice(0),), file_shape=file_shape)

    def _width(self, field: str, columns: slice) -> int:
        """The columns that a file fills of a weight, or of its scales, in memory."""
        scheme, size = self.scheme, columns.stop - columns.start
        return size * scheme.bits // 8 if field == "weight" else scheme.num_groups(size)

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
        if adapters is not None:  # they apply between the two GEMMs
            all_experts = self.kernel.dequantized(self.scheme, shape, weights, x.values.dtype)
            return grouped_experts(x.whole(), all_experts, routed, adapters)
        return self.kernel.apply(self.scheme, shape, weights, x, routed)
