"""GPTQ, AWQ and AutoRound: integers packed in int32 words, with scales and zero points per group.

Files have [columns, rows], so all tensors are transposed. GPTQ packs columns, lowest bits first,
and its version 1 stores zero points minus one. AWQ packs rows in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.models.quantization.file_config import Keys, named_by
from asyncllm.models.quantization.fp8_files import ReaderOf
from asyncllm.models.quantization.method import Matrix, Reader, Source
from asyncllm.models.quantization.scheme import Kind, Scheme
from asyncllm.models.quantization.sources import (
    WORD_BITS,
    ActOrder,
    Header,
    check_groups,
    checked,
    stored,
    unpack_words,
)

BITS = (4, 8)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight rows in a word
AUTO_ROUND_LAYOUTS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
KIND_OF_BITS: dict[int, Kind] = {4: "int4", 8: "int8"}


def gptq(keys: Keys, header: Header) -> ReaderOf:
    keys.one_of("lm_head", (False,), False)
    keys.one_of("modules_in_block_to_quantize", (None,))
    zero_shift = {"gptq": 1, "gptq_v2": 0}[
        keys.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    ]

    def reader(own: Keys) -> Reader:
        bits, group = _bits_and_group(own, keys)
        sym, ordered = (_either(own, keys, key) for key in ("sym", "desc_act"))
        return _gptq_reader(bits, group, sym, ordered, zero_shift)

    common = reader(keys)
    rules = [
        (
            keys.pattern("dynamic", text.removeprefix("-:").removeprefix("+:")),
            None if text.startswith("-:") else reader(own),
        )
        for text, own in keys.children("dynamic").items()
    ]

    def reader_of(name: str) -> Reader | None:
        return next((its for pattern, its in rules if pattern.match(name)), common)

    return reader_of


def _either(own: Keys, common: Keys, key: str) -> bool:
    default = common.one_of(key, (True, False), key == "sym")
    return bool(own.one_of(key, (True, False), default))


def _bits_and_group(own: Keys, common: Keys) -> tuple[int, int | None]:
    bits = own.one_of("bits", BITS, common.get("bits"))
    key = "group_size"
    return bits, own.size(key) if key in own else common.size(key, 128)


def awq(keys: Keys, header: Header) -> ReaderOf:
    keys.one_of("version", ("gemm", "GEMM"), "gemm")
    bits = keys.one_of("bits", (4,), keys.get("w_bit"))
    group = keys.size("group_size", keys.get("q_group_size", 128))
    has_zero = keys.one_of("zero_point", (True, False), True)
    reader = _awq_reader(bits, group, symmetric=not has_zero)
    names = keys.names("modules_to_not_convert")
    return lambda name: None if any(left in name for left in names) else reader


def auto_round(keys: Keys, header: Header) -> ReaderOf:
    layout = AUTO_ROUND_LAYOUTS[keys.one_of("packing_format", tuple(AUTO_ROUND_LAYOUTS))]
    keys.one_of("data_type", ("int",), "int")
    keys.one_of("act_bits", (16, 32), 16)

    def reader(own: Keys) -> Reader | None:
        if own.get("bits", keys.get("bits")) == 16:
            return None
        own.one_of("data_type", ("int",), "int")
        bits, group = _bits_and_group(own, keys)
        sym = _either(own, keys, "sym")
        if layout == "awq":
            return _awq_reader(bits, group, sym)
        return _gptq_reader(bits, group, sym, ordered=False, zero_shift=1)

    common = reader(keys)
    by_name = [
        (named_by([name]), reader(own)) for name, own in keys.children("extra_config").items()
    ]

    def reader_of(name: str) -> Reader | None:
        return next((its for is_named, its in by_name if is_named(name)), common)

    return reader_of


def _gptq_reader(bits: int, group: int | None, sym: bool, ordered: bool, zero_shift: int) -> Reader:
    scheme = Scheme(
        KIND_OF_BITS[bits], group, has_offset=not sym, has_order=ordered and group is not None
    )
    return Reader(scheme, partial(_gptq_sources, scheme, zero_shift))


def _gptq_sources(
    scheme: Scheme, zero_shift: int, name: str, rows: int, columns: int
) -> Iterator[Source]:
    bits, per_word = scheme.bits, WORD_BITS // scheme.bits
    groups = check_sizes(scheme, name, rows, columns)
    order = ActOrder(columns, scheme.group, is_sorted=not scheme.has_order)
    yield order.source("g_idx")
    yield Source(
        "qweight",
        (columns // per_word, rows),
        torch.int32,
        ("weight",),
        lambda words: [stored(scheme, order.sort(unpack_words(words, bits, 0).T))],
        Matrix(columns=per_word, is_transposed=True),
    )
    yield from _scales_and_zeros(
        scheme, rows, groups, lambda words: (unpack_words(words, bits, 1) + zero_shift) & 255
    )


def _awq_reader(bits: int, group: int | None, symmetric: bool) -> Reader:
    scheme = Scheme(KIND_OF_BITS[bits], group, has_offset=not symmetric)
    return Reader(scheme, partial(_awq_sources, scheme))


def _awq_sources(scheme: Scheme, name: str, rows: int, columns: int) -> Iterator[Source]:
    groups = check_sizes(scheme, name, rows, columns)

    def unpack(words: torch.Tensor) -> torch.Tensor:
        """[..., rows / 8] -> [..., rows]"""
        codes = unpack_words(words, scheme.bits, 1).unflatten(1, (-1, len(AWQ_ORDER)))
        return codes[:, :, list(AWQ_ORDER)].flatten(1)

    yield Source(
        "qweight",
        (columns, rows * scheme.bits // WORD_BITS),
        torch.int32,
        ("weight",),
        lambda words: [stored(scheme, unpack(words).T)],
        Matrix(rows=WORD_BITS // scheme.bits, is_transposed=True),
    )
    yield from _scales_and_zeros(scheme, rows, groups, unpack)


def _scales_and_zeros(
    scheme: Scheme, rows: int, groups: int, unpack: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[Source]:
    """`scales` [groups, rows], then `qzeros`, which `unpack` converts to that shape."""
    scales: list[torch.Tensor] = []
    middle = 1 << (scheme.bits - 1)

    def keep(scale: torch.Tensor) -> list[torch.Tensor]:
        scales[:] = [checked(scale)]
        return [scales[0].T]

    def convert(words: torch.Tensor) -> list[torch.Tensor]:
        zeros = unpack(words)
        if scheme.has_offset:
            return [((middle - zeros) * scales.pop()).T]
        if bool((zeros != middle).any()):
            raise ValueError(f"is not {middle} throughout, but config.json says sym true")
        return []

    yield Source("scales", (groups, rows), torch.float16, ("scale",), keep)
    fields = ("offset",) if scheme.has_offset else ()
    shape = groups, rows * scheme.bits // WORD_BITS
    yield Source("qzeros", shape, torch.int32, fields, convert)


def check_sizes(scheme: Scheme, name: str, rows: int, columns: int) -> int:
    """The number of groups. Raises `ModelLoadError` if words or groups do not divide the matrix."""
    per_word = WORD_BITS // scheme.bits
    if rows % per_word or columns % per_word:
        raise ModelLoadError(
            f"{name}: [{rows}, {columns}] cannot be packed {per_word} numbers to a word"
        )
    check_groups(name, columns, scheme.group)
    return scheme.num_groups(columns)
