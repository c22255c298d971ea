"""compressed-tensors: groups of layers, each with a scheme, in one of several layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from asyncllm.models.quantization.file_config import Keys, targeted_by
from asyncllm.models.quantization.fp8_files import ReaderOf, block_sources
from asyncllm.models.quantization.method import Matrix, Reader, Source, converted
from asyncllm.models.quantization.packed_files import KIND_OF_BITS
from asyncllm.models.quantization.scheme import E8M0_BIAS, Activations, Scheme
from asyncllm.models.quantization.sources import (
    WORD_BITS,
    ActOrder,
    Header,
    check_exponents,
    check_groups,
    checked,
    fp8_weight,
    input_scale,
    row_scale,
    stored,
    unpack_words,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
           "mxfp4-pack-quantized")  # fmt: skip
STRATEGIES = ("tensor", "channel", "group", "block")
MXFP4_GROUP = 32


class Layout(NamedTuple):
    """The facts that the sources of a group of layers depend on, besides its scheme."""

    packed: bool
    strategy: str
    has_g_idx: bool
    header: Header


def compressed_tensors(keys: Keys, header: Header) -> ReaderOf:
    keys.one_of("transform_config", (None, {}))  # rotations of weights and activations
    is_ignored = targeted_by(keys, "ignore")
    default = keys.get("format")
    groups = [
        (targeted_by(group, "targets"), _reader(group, default, header))
        for group in keys.children("config_groups").values()
    ]
    if not groups:
        raise keys.error("config_groups", "must hold a group")

    def reader_of(name: str) -> Reader | None:
        if is_ignored(name):
            return None
        return next((reader for is_target, reader in groups if is_target(name)), None)

    return reader_of


def _reader(group: Keys, default_format: str | None, header: Header) -> Reader:
    layout = group.one_of("format", FORMATS, default_format)
    weights = group.child("weights")
    bits = weights.one_of("num_bits", (4, 8))
    if layout == "mxfp4-pack-quantized":
        weights.one_of("type", ("float",), "float")
        scheme = Scheme("fp4", MXFP4_GROUP)
        return Reader(scheme, _mxfp4_sources)
    kind = weights.one_of("type", ("int", "float"), "int")
    packed = layout == "pack-quantized"
    if (packed and kind == "float") or (not packed and bits != 8):
        raise weights.error("num_bits", f"of type {kind} is not served in format {layout}")
    strategy = weights.one_of("strategy", STRATEGIES, "tensor")
    symmetric = weights.one_of("symmetric", (True, False), True)
    columns = weights.size("group_size") if strategy == "group" else None
    if strategy == "group" and columns is None:
        raise weights.error("group_size", "must be given with strategy 'group'")
    ordered = weights.get("actorder") == "group" and columns is not None
    activations = _activations(group, kind)
    if kind == "float":
        if not symmetric:
            raise weights.error("symmetric", "must be true for type float")
        if strategy == "block":
            if (block := weights.block("block_structure")) is None:
                raise weights.error("block_structure", "must be given with strategy 'block'")
            scheme = Scheme("fp8", block[1], activations=activations)
            return Reader(scheme, partial(block_sources, block, "weight_scale"))
        scheme = Scheme("fp8", columns, activations=activations)
    else:
        weights.one_of("strategy", STRATEGIES[:3], strategy)
        if activations is not None and (columns is not None or not symmetric or bits != 8):
            raise group.error("input_activations", "are served with int8 of whole rows alone")
        scheme = Scheme(KIND_OF_BITS[bits], columns, not symmetric, ordered, activations)
    return Reader(scheme, partial(_sources, scheme, Layout(packed, strategy, ordered, header)))


def _activations(group: Keys, kind: str) -> Activations | None:
    if "input_activations" not in group:
        return None
    keys = group.child("input_activations")
    keys.one_of("num_bits", (8,))
    keys.one_of("type", (kind,), kind)
    keys.one_of("symmetric", (True,), True)
    return "dynamic" if keys.one_of("dynamic", (True, False), False) else "static"


def _sources(
    scheme: Scheme, layout: Layout, name: str, rows: int, columns: int
) -> Iterator[Source]:
    groups = scheme.num_groups(columns)
    check_groups(name, columns, scheme.group)
    order = ActOrder(columns, scheme.group, is_sorted=not scheme.has_order)
    if layout.has_g_idx:
        yield order.source("weight_g_idx")
    if layout.packed:
        yield _packed_weight(scheme, order, rows, columns)
        yield _shape(rows, columns)
    elif scheme.kind == "fp8":
        yield fp8_weight(rows, columns)
    else:
        yield Source(
            "weight",
            (rows, columns),
            torch.int8,
            ("weight",),
            lambda codes: [order.sort(codes)],
            Matrix(),
        )
    scales: list[torch.Tensor] = []
    yield _scale(scheme, layout, name, rows, groups, scales)
    if scheme.has_offset:
        yield _zero_point(scheme, layout.packed, rows, groups, scales)
    if scheme.activations == "static":
        yield input_scale(layout.header, name)


def _packed_weight(scheme: Scheme, order: ActOrder, rows: int, columns: int) -> Source:
    """Rows of int32 words; the last word of a row may be padded."""
    bits = scheme.bits
    num_words = -(-columns * bits // WORD_BITS)

    def convert(words: torch.Tensor) -> list[torch.Tensor]:
        return [stored(scheme, order.sort(unpack_words(words, bits, 1)[:, :columns]))]

    matrix = Matrix(columns=WORD_BITS // bits)
    return Source("weight_packed", (rows, num_words), torch.int32, ("weight",), convert, matrix)


def _shape(rows: int, columns: int) -> Source:
    def check(shape: torch.Tensor) -> list[torch.Tensor]:
        if shape.tolist() != [rows, columns]:
            raise ValueError(f"is {shape.tolist()}, config.json says {[rows, columns]}")
        return []

    return Source("weight_shape", (2,), torch.int64, (), check)


def _scale(
    scheme: Scheme, layout: Layout, name: str, rows: int, groups: int, scales: list[torch.Tensor]
) -> Source:
    """Appends the scale [rows, groups] to `scales`, for the zero points that are read after it."""
    source = row_scale(layout.header, name, "weight_scale", rows)
    if layout.strategy == "group":
        source = replace(source, shape=(rows, groups), convert=lambda scale: [checked(scale)])

    def keep(_: str, scale: torch.Tensor) -> torch.Tensor:
        scales[:] = [scale]
        return scale

    return converted(source, keep) if scheme.has_offset else source


def _zero_point(
    scheme: Scheme, packed: bool, rows: int, groups: int, scales: list[torch.Tensor]
) -> Source:
    """Signed, or, packed along the rows, with their middle as zero."""
    bits = scheme.bits

    def convert(zeros: torch.Tensor) -> list[torch.Tensor]:
        if packed:
            zeros = unpack_words(zeros, bits, 0)[:rows] - (1 << (bits - 1))
        return [-zeros.float() * scales.pop()]

    if not packed:
        return Source("weight_zero_point", (rows, groups), torch.int8, ("offset",), convert)
    shape = -(-rows * bits // WORD_BITS), groups
    return Source("weight_zero_point", shape, torch.int32, ("offset",), convert)


def _mxfp4_sources(name: str, rows: int, columns: int) -> Iterator[Source]:
    check_groups(name, columns, MXFP4_GROUP)
    matrix = Matrix(columns=2)
    yield Source("weight_packed", (rows, columns // 2), torch.uint8, ("weight",), matrix=matrix)

    def convert(exponents: torch.Tensor) -> list[torch.Tensor]:
        return [torch.exp2(check_exponents(exponents).float() - E8M0_BIAS)]

    shape = rows, columns // MXFP4_GROUP
    yield Source("weight_scale", shape, torch.uint8, ("scale",), convert)
