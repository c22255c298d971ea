"""The method of quantised linear layers: storage, loading, and the product by a kernel.

A reader maps the tensors of a file to fields of the stored form (`Source`), and the method loads
them into their rows of the merged layer. The form in memory is that of scheme.py, so a reload
writes the same tensors. `finish` makes other tensors that a kernel needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.models.base import Load
from asyncllm.models.layers.linear_method import WHOLE, LinearShape, Weights, bias_loads
from asyncllm.models.layers.ops import Epilogue, Normed, Out
from asyncllm.models.quantization.scheme import Scheme


class Matrix(NamedTuple):
    """The layout of a matrix in a two-dimensional tensor of a file, of which a part can be read and
    converted alone. rows, columns: the number of matrix rows or columns per tensor element."""

    rows: int = 1
    columns: int | None = 1  # None: rows are converted whole
    is_transposed: bool = False

    def part(self, rows: range | None, columns: slice | None) -> tuple[slice, ...] | None:
        """The slices of the tensor with these rows and columns (None: all); None: they cannot be
        read alone."""
        found = []
        for wanted, each in ((rows, self.rows), (columns, self.columns)):
            if wanted is None:
                found.append(slice(None))
            elif each is None or wanted.start % each or wanted.stop % each:
                return None
            else:
                found.append(slice(wanted.start // each, wanted.stop // each))
        first, second = found[::-1] if self.is_transposed else found
        return (first,) if second == slice(None) else (first, second)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, and the fields that it is converted to.

    suffix: follows the layer's name and a dot; without the dot if it begins with "_" or is empty.
    convert: returns the contents of `fields`, in their order, [rows, ...] each; None: the tensor is
    the only field. Without fields it only checks. Raises `ValueError` with a message that continues
    after the tensor's name. Sources are read in order, so a later one may use results of an
    earlier. matrix: lets a rank read its part alone; None: it reads all, and keeps its part.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fields: tuple[str, ...] = ()
    convert: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None
    matrix: Matrix | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A file format of linear layers.

    sources: (name, rows, columns) -> all tensors of a layer except its bias. Raises
    `ModelLoadError` for sizes that the format does not allow. stacked: a family's load of several
    16-bit experts -> the tensors that replace it; None: not supported.
    """

    scheme: Scheme
    sources: Callable[[str, int, int], Iterator[Source]]
    stacked: Callable[[Load], Iterator[Source]] | None = None


class QuantKernel(Protocol):
    """Products with quantised weights on one device."""

    def prepare(self, scheme: Scheme, weights: Weights) -> None:
        """Add derived tensors that products need to `weights`; after a reload in place."""
        ...

    def in_bytes(self, scheme: Scheme, weights: Weights) -> torch.dtype | None:
        """As `LinearMethod.in_bytes`."""
        return None

    def product(self, scheme: Scheme, weights: Weights, x: Normed) -> torch.Tensor:
        """[T, columns] -> [T, rows], a new tensor, including the bias."""
        ...

    def fused(
        self, scheme: Scheme, weights: Weights, x: Normed, epilogue: Epilogue[Out]
    ) -> Out | None:
        """The product, its bias and the epilogue in one kernel; None: there is no such kernel."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinearMethod:
    """dtype: the model's, of scales, offsets and biases in memory."""

    reader: Reader
    kernel: QuantKernel
    dtype: torch.dtype
    device: torch.device

    @property
    def scheme(self) -> Scheme:
        return self.reader.scheme

    def create_weights(self, shape: LinearShape) -> Weights:
        scheme, rows, columns = self.scheme, shape.out_features, shape.num_columns
        self._check_columns(shape)
        groups = scheme.num_groups(columns)
        scale_dtype = scheme.scale_dtype(self.dtype)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((rows, columns * scheme.bits // 8), scheme.dtype),
            "scale": ((rows, groups), scale_dtype),
        }
        if scheme.has_offset:
            sizes["offset"] = (rows, groups), scale_dtype
        if scheme.has_order:
            sizes["order"] = (len(shape.parts), columns), torch.int32
        if scheme.activations == "static":
            sizes["input_scale"] = (len(shape.parts), 1), torch.float32
        if shape.has_bias:
            sizes["bias"] = (rows,), self.dtype
        return {
            name: torch.empty(size, dtype=dtype, device=self.device)
            for name, (size, dtype) in sizes.items()
        }

    def loads(self, shape: LinearShape, weights: Weights) -> Iterator[Load]:
        start = 0
        for number, (name, rows) in enumerate(shape.sizes.items()):
            own, by_row = slice(number, number + 1), slice(start, start + rows)
            place = {"order": own, "input_scale": own}
            for source in self.reader.sources(name, shape.parts[name], shape.in_features):
                part: tuple[slice, ...] = ()
                if shape.shard != WHOLE and source.fields:
                    source, part = self._shard(source, shape, name)
                views = [weights[field][place.get(field, by_row)] for field in source.fields]
                yield replace(source_load(name, source, views, self.device), part=part)
            start += rows
        yield from bias_loads(shape, weights)

    def _check_columns(self, shape: LinearShape) -> None:
        """Raises `ModelLoadError` if ranks cannot divide the columns."""
        columns = shape.shard.columns
        if columns is None:
            return
        (name,) = shape.parts
        if self.scheme.has_order:
            raise ModelLoadError(
                f"{name}: columns in an order (desc_act, actorder) are not divided over ranks"
            )
        check_columns(self.scheme, name, columns, shape.in_features)

    def _shard(
        self, source: Source, shape: LinearShape, name: str
    ) -> tuple[Source, tuple[slice, ...]]:
        """A rank's shard: a part of the file's tensor, or else of the converted tensor."""
        columns, ranges = shape.shard.columns, shape.rows(name)
        if source.matrix is not None and len(ranges) == 1:
            rows = None if columns is not None else range(shape.parts[name])[ranges[0]]
            if (part := source.matrix.part(rows, columns)) is not None:
                return source, part

        def cut(field: str, tensor: torch.Tensor) -> torch.Tensor:
            if field in ("order", "input_scale"):
                return tensor
            if columns is None:
                return torch.cat([tensor[rows] for rows in ranges])
            return tensor[:, place_of_columns(self.scheme, field, columns)]

        return converted(source, cut), ()

    def finish(self, weights: Weights) -> None:
        order = weights.get("order")
        if order is not None and not (order == order[0]).all():
            raise ModelLoadError(
                "g_idx differs between the parts of one product (q_proj, k_proj, v_proj or "
                "gate_proj, up_proj), which is not supported"
            )
        self.kernel.prepare(self.scheme, weights)

    def in_bytes(self, weights: Weights) -> torch.dtype | None:
        return self.kernel.in_bytes(self.scheme, weights)

    def product(self, weights: Weights, x: Normed) -> torch.Tensor:
        return self.kernel.product(self.scheme, weights, x)

    def fused(self, weights: Weights, x: Normed, epilogue: Epilogue[Out]) -> Out | None:
        return self.kernel.fused(self.scheme, weights, x, epilogue)


def check_columns(scheme: Scheme, name: str, columns: slice, num_columns: int) -> None:
    """Raises `ModelLoadError` if a rank's columns do not end at a group and a byte."""
    unit = max(scheme.group or 1, 8 // scheme.bits)
    if columns.start % unit or columns.stop % unit:
        raise ModelLoadError(
            f"{name}: ranks have {columns.stop - columns.start} of its {num_columns} columns each, "
            f"which groups of {unit} do not divide"
        )


def place_of_columns(scheme: Scheme, field: str, columns: slice) -> slice:
    """The slice of a field with these columns, which `check_columns` has accepted."""
    first, last = columns.start, columns.stop
    if field == "weight":
        return slice(first * scheme.bits // 8, last * scheme.bits // 8)
    return (
        slice(None) if scheme.group is None else slice(first // scheme.group, last // scheme.group)
    )


def converted(source: Source, cut: Callable[[str, torch.Tensor], torch.Tensor]) -> Source:
    """The same source, with `cut` applied to its fields."""

    def convert(tensor: torch.Tensor) -> list[torch.Tensor]:
        made = [tensor] if source.convert is None else source.convert(tensor)
        return [cut(*each) for each in zip(source.fields, made, strict=True)]

    return replace(source, convert=convert)


def source_load(name: str, source: Source, views: list[torch.Tensor], device: torch.device) -> Load:
    """The load of a source. views: of its fields."""
    transform = None
    if source.convert is not None:
        transform = partial(_fill, source.convert, views)
    return Load(
        named(name, source),
        views[0] if views else torch.empty(0, device=device),
        transform=transform,
        file_shape=source.shape,
        file_dtype=source.dtype,
        others=tuple(views[1:]),
    )


def named(name: str, source: Source) -> str:
    """The name of a layer's tensor in the file."""
    join = "" if source.suffix.startswith("_") or not source.suffix else "."
    return f"{name}{join}{source.suffix}"


def _fill(
    convert: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    views: Sequence[torch.Tensor],
    tensor: torch.Tensor,
) -> torch.Tensor:
    """A `Load.transform`: returns the first view's contents, and fills the other views."""
    made = convert(tensor)
    for view, contents in zip(views[1:], made[1:], strict=True):
        view.copy_(contents)
    return made[0] if made else tensor.new_empty(0)
