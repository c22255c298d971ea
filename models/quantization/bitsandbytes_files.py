"""bitsandbytes: nf4 in blocks of the flattened matrix, and int8 by rows.

Its LLM.int8() quantises most inputs too; here all inputs stay in 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.models.quantization.file_config import Keys, named_by
from asyncllm.models.quantization.fp8_files import ReaderOf
from asyncllm.models.quantization.method import Matrix, Reader, Source
from asyncllm.models.quantization.scheme import CODE_VALUES, Scheme
from asyncllm.models.quantization.sources import Header, check_groups, checked

BLOCK = 64
NESTED_BLOCKS = tuple(1 << bits for bits in range(5, 13))  # 32 to 4096, as bitsandbytes has them
INT8_MAX = 127.0
MAX_STATE_BYTES = 1 << 16


def bitsandbytes(keys: Keys, header: Header) -> ReaderOf:
    if keys.one_of("load_in_8bit", (True, False), False):
        reader = Reader(Scheme("int8"), partial(_int8_sources, header))
    else:
        keys.one_of("load_in_4bit", (True,))
        keys.one_of("bnb_4bit_quant_type", ("nf4",), "fp4")
        keys.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
        scheme = Scheme("nf4", BLOCK)
        reader = Reader(scheme, partial(_nf4_sources, header))
    is_left = named_by(keys.names("llm_int8_skip_modules"))
    return lambda name: None if is_left(name) else reader


def _int8_sources(header: Header, name: str, rows: int, columns: int) -> Iterator[Source]:
    yield Source("weight", (rows, columns), torch.int8, ("weight",), matrix=Matrix())
    yield Source(
        "SCB",
        (rows,),
        torch.float32,
        ("scale",),
        lambda most: [(checked(most) / INT8_MAX).unsqueeze(1)],
    )
    if (found := header(f"{name}.weight_format")) is not None:
        yield Source("weight_format", found[0], torch.uint8, (), _check_row_major)


def _check_row_major(weight_format: torch.Tensor) -> list[torch.Tensor]:
    if int(weight_format) != 0:
        raise ValueError(f"is {int(weight_format)}, only 0 (rows) is served")
    return []


def _nf4_sources(header: Header, name: str, rows: int, columns: int) -> Iterator[Source]:
    check_groups(name, columns, BLOCK)
    kept: dict[str, Any] = {}
    num_blocks = rows * columns // BLOCK
    suffix = "weight.quant_state.bitsandbytes__nf4"
    found = header(f"{name}.{suffix}")
    size = found[0] if found is not None and len(found[0]) == 1 else (0,)
    if size[0] > MAX_STATE_BYTES:
        raise ModelLoadError(f"{name}.{suffix}: {size[0]} bytes are more than {MAX_STATE_BYTES}")

    nested = header(f"{name}.weight.nested_absmax")

    def state(content: torch.Tensor) -> list[torch.Tensor]:
        kept.update(_read_state(content, rows, columns, nested is not None))
        return []

    yield Source(suffix, size, torch.uint8, (), state)
    yield Source("weight.quant_map", (16,), torch.float32, (), _check_map)
    if nested is not None:

        def keep(key: str, tensor: torch.Tensor) -> list[torch.Tensor]:
            kept[key] = tensor
            return []

        def keep_scales(scales: torch.Tensor) -> list[torch.Tensor]:
            if scales.numel() != (count := -(-num_blocks // kept["nested_blocksize"])):
                raise ValueError(f"has {scales.numel()} scales, not {count}")
            return keep("absmax", scales)

        yield Source("weight.nested_absmax", nested[0], torch.float32, (), keep_scales)
        yield Source("weight.nested_quant_map", (256,), torch.float32, (), partial(keep, "map"))

        def unnest(codes: torch.Tensor) -> list[torch.Tensor]:
            most = kept["absmax"].repeat_interleave(kept["nested_blocksize"])[:num_blocks]
            scale = kept["map"][codes.int()] * most + kept["nested_offset"]
            return [checked(scale).view(rows, -1)]

        yield Source("weight.absmax", (num_blocks,), torch.uint8, ("scale",), unnest)
    else:
        yield Source(
            "weight.absmax",
            (num_blocks,),
            torch.float32,
            ("scale",),
            lambda scale: [checked(scale).view(rows, -1)],
        )
    yield Source("weight", (rows * columns // 2, 1), torch.uint8, ("weight",), partial(_swap, rows))


def _swap(rows: int, packed: torch.Tensor) -> list[torch.Tensor]:
    """The earlier of two codes is in the high bits."""
    return [(packed >> 4 | packed << 4).view(rows, -1)]


def _check_map(values: torch.Tensor) -> list[torch.Tensor]:
    expected = torch.tensor(CODE_VALUES["nf4"], device=values.device)
    if not torch.allclose(values.float(), expected, atol=1e-6):
        raise ValueError("holds other values than nf4 has")
    return []


def _read_state(
    content: torch.Tensor, rows: int, columns: int, is_nested: bool
) -> Mapping[str, Any]:
    try:
        state = json.loads(bytes(content.tolist()))
        shape, block, kind = list(state["shape"]), state["blocksize"], state["quant_type"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"is no state of bitsandbytes: {error!r}") from error
    if kind != "nf4" or block != BLOCK or shape != [rows, columns]:
        raise ValueError(
            f"says {kind} in blocks of {block} of {shape}: only nf4 in blocks of {BLOCK} of "
            f"{[rows, columns]} is served"
        )
    if not is_nested:
        return {}
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if block not in NESTED_BLOCKS:
        raise ValueError(f"says nested_blocksize {block!r}, not one of {NESTED_BLOCKS}")
    if type(offset) not in (int, float) or not abs(offset) <= torch.finfo(torch.float32).max:
        raise ValueError(f"says nested_offset {offset!r}, not a finite number")
    return {"nested_blocksize": int(block), "nested_offset": offset}
