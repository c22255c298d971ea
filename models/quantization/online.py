"""`--quantization`: a 16-bit checkpoint is quantised while it is read, one matrix at a time.

Only the matrix that is being read is on the device in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from asyncllm.model_config import Quantization
from asyncllm.models.base import Load
from asyncllm.models.quantization.fp8_files import ReaderOf
from asyncllm.models.quantization.method import Matrix, Reader, Source
from asyncllm.models.quantization.scheme import Scheme, quantize
from asyncllm.models.quantization.sources import check_groups

INT4_GROUP = 128
ROWS = 16_384  # at a time, for the sake of memory
SCHEMES: dict[Quantization, Scheme] = {
    "fp8": Scheme("fp8", activations="dynamic"),
    "int8": Scheme("int8", activations="dynamic"),
    "int4": Scheme("int4", group=INT4_GROUP),
}


def online(quantization: Quantization) -> ReaderOf:
    scheme = SCHEMES[quantization]
    reader = Reader(scheme, partial(_sources, scheme), partial(_stacked, scheme))
    return lambda name: reader


def _sources(scheme: Scheme, name: str, rows: int, columns: int) -> Iterator[Source]:
    check_groups(f"quantization {scheme.kind}: {name}", columns, scheme.group)
    yield Source(
        "weight",
        (rows, columns),
        torch.bfloat16,
        ("weight", "scale"),
        partial(_quantize, scheme),
        Matrix(columns=None if scheme.group is None else 1),
    )


def _stacked(scheme: Scheme, load: Load) -> Iterator[Source]:
    """One tensor of several experts, reordered as the family's 16-bit weights are."""
    order = load.transform or (lambda tensor: tensor)
    check_groups(f"quantization {scheme.kind}: {load.name}", load.view.shape[-1], scheme.group)
    yield Source(
        "",
        load.file_shape or tuple(load.view.shape),
        torch.bfloat16,
        ("weight", "scale"),
        lambda experts: _quantize(scheme, order(experts).flatten(0, 1)),
    )


def _quantize(scheme: Scheme, matrix: torch.Tensor) -> list[torch.Tensor]:
    if not torch.isfinite(matrix).all():
        raise ValueError("holds numbers that are not finite, which cannot be quantised")
    made = [quantize(scheme, rows) for rows in matrix.split(ROWS)]
    return [torch.cat(parts) for parts in zip(*made, strict=True)]
