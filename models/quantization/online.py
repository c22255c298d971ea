"""`--quantization`: 16 bits become fewer while they stream in, one matrix of the file at a time.

Only the matrix that is being read is ever on the device in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.model_config import Quantization
from asyncllm.models.quantization.fp8_files import ReaderOf
from asyncllm.models.quantization.method import Reader, Source
from asyncllm.models.quantization.scheme import Scheme, quantize

INT4_GROUP = 128
SCHEMES: dict[Quantization, Scheme] = {
    "fp8": Scheme("fp8", activations="dynamic"),
    "int8": Scheme("int8", activations="dynamic"),
    "int4": Scheme("int4", group=INT4_GROUP),
}


def online(quantization: Quantization) -> ReaderOf:
    scheme = SCHEMES[quantization]
    reader = Reader(scheme, partial(_sources, scheme))
    return lambda name: reader


def _sources(scheme: Scheme, name: str, rows: int, columns: int) -> Iterator[Source]:
    if scheme.group is not None and columns % scheme.group:
        raise ModelLoadError(
            f"quantization {scheme.kind}: {name} has {columns} columns, which groups of "
            f"{scheme.group} do not divide"
        )
    yield Source(
        "weight", (rows, columns), torch.bfloat16, ("weight", "scale"), partial(_quantize, scheme)
    )


def _quantize(scheme: Scheme, matrix: torch.Tensor) -> list[torch.Tensor]:
    if not torch.isfinite(matrix).all():
        raise ValueError("holds numbers that are not finite, which cannot be quantised")
    return [*quantize(scheme, matrix)]
