"""MXFP4 as gpt-oss publishes it: only experts, with two tensors per layer and projection.

    name_blocks  uint8 [experts, rows, groups, 16]   two columns per byte, the earlier in low bits
    name_scales  uint8 [experts, rows, groups]       exponents (e8m0) of groups of 32 columns

Rows of gate_up_proj alternate between gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.models.base import Load
from asyncllm.models.quantization.file_config import Keys, named_by_glob
from asyncllm.models.quantization.fp8_files import ReaderOf
from asyncllm.models.quantization.method import Reader, Source
from asyncllm.models.quantization.scheme import Scheme
from asyncllm.models.quantization.sources import Header, check_exponents, check_groups

GROUP = 32
SCHEME = Scheme("fp4", GROUP, has_exponents=True)
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def mxfp4(keys: Keys, header: Header) -> ReaderOf:
    is_left = named_by_glob(keys.names("modules_to_not_convert"))
    reader = Reader(SCHEME, _refuse, _stacked)

    def reader_of(name: str) -> Reader | None:
        return reader if name.endswith(EXPERTS) and not is_left(name) else None

    return reader_of


def _refuse(name: str, rows: int, columns: int) -> Iterator[Source]:
    raise ModelLoadError(f"{name}: quant_method 'mxfp4' is served of experts in one tensor alone")


def _stacked(load: Load) -> Iterator[Source]:
    experts, rows, columns = load.view.shape
    check_groups(load.name, columns, GROUP)
    shape, alternates = (experts, rows, columns // GROUP), load.name.endswith("gate_up_proj")

    def ordered(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1) if alternates else rows

    def blocks(codes: torch.Tensor) -> list[torch.Tensor]:
        return [ordered(codes).flatten(2).flatten(0, 1)]

    def scales(exponents: torch.Tensor) -> list[torch.Tensor]:
        return [ordered(check_exponents(exponents)).flatten(0, 1)]

    yield Source("_blocks", (*shape, GROUP // 2), torch.uint8, ("weight",), blocks)
    yield Source("_scales", shape, torch.uint8, ("scale",), scales)
