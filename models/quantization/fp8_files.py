"""FP8 checkpoints: Hugging Face's and DeepSeek's `fp8`, and modelopt's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from asyncllm.models.quantization.file_config import Keys, named_by, named_by_glob
from asyncllm.models.quantization.method import Reader, Source
from asyncllm.models.quantization.scheme import Scheme
from asyncllm.models.quantization.sources import (
    Header,
    checked,
    fp8_weight,
    input_scale,
    row_scale,
)

ReaderOf = Callable[[str], Reader | None]  # a layer's name -> its reader; None: it is in 16 bits
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
MODELOPT_BLOCK = (128, 128)


def fp8(keys: Keys, header: Header) -> ReaderOf:
    activations = keys.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = keys.block("weight_block_size")
    if block is None:
        reader = _by_row(activations, header)
    elif activations == "static":
        raise keys.error("weight_block_size", "is not served with static activations")
    else:
        reader = _by_block(block, "weight_scale_inv")
    is_left = named_by(keys.names("modules_to_not_convert", "ignored_layers"))
    return lambda name: None if is_left(name) else reader


def modelopt(keys: Keys, header: Header) -> ReaderOf:
    algorithm = keys.one_of("quant_algo", MODELOPT_ALGORITHMS)
    if algorithm == "FP8_PB_WO":
        reader = _by_block(MODELOPT_BLOCK, "weight_scale")
    else:
        reader = _by_row("static" if algorithm == "FP8" else "dynamic", header)
    is_left = named_by_glob(keys.names("exclude_modules", "ignore"))
    return lambda name: None if is_left(name) else reader


def _by_row(activations: str, header: Header) -> Reader:
    """One scale per tensor, or per row."""
    scheme = Scheme("fp8", activations="static" if activations == "static" else "dynamic")
    return Reader(scheme, partial(_row_sources, scheme, header))


def _row_sources(
    scheme: Scheme, header: Header, name: str, rows: int, columns: int
) -> Iterator[Source]:
    yield fp8_weight(rows, columns)
    yield row_scale(header, name, "weight_scale", rows)
    if scheme.activations == "static":
        yield input_scale(header, name)


def _by_block(block: tuple[int, int], suffix: str) -> Reader:
    """One scale per block of rows and columns; blocks at the edges may be smaller."""
    scheme = Scheme("fp8", group=block[1], activations="dynamic")
    return Reader(scheme, partial(block_sources, block, suffix))


def block_sources(
    block: tuple[int, int], suffix: str, name: str, rows: int, columns: int
) -> Iterator[Source]:
    yield fp8_weight(rows, columns)
    shape = -(-rows // block[0]), -(-columns // block[1])

    def convert(scale: torch.Tensor) -> list[torch.Tensor]:
        return [checked(scale).repeat_interleave(block[0], dim=0)[:rows]]

    yield Source(suffix, shape, torch.float32, ("scale",), convert)
