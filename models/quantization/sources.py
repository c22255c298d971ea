"""Parts that readers of several formats share: unpacking, checked scales, act-order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.models.quantization.method import Matrix, Source
from asyncllm.models.quantization.scheme import FP8, Scheme, pack

WORD_BITS = 32
E8M0_NAN = 255
Header = Callable[[str], tuple[tuple[int, ...], torch.dtype] | None]


def check_groups(name: str, columns: int, group: int | None) -> None:
    """Raises `ModelLoadError` unless groups of this many columns divide a matrix."""
    if group is not None and columns % group:
        raise ModelLoadError(f"{name}: group_size {group} does not divide its {columns} columns")


def check_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Scales in e8m0. Raises `ValueError` for a NaN."""
    if bool((exponents == E8M0_NAN).any()):
        raise ValueError(f"holds {E8M0_NAN}, which is NaN")
    return exponents


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words -> unsigned codes int32, unpacked along `dim` 0 or 1, lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)  # [a, b, per word]
    return codes.flatten(1) if dim == 1 else codes.transpose(1, 2).flatten(0, 1)


def stored(scheme: Scheme, codes: torch.Tensor) -> torch.Tensor:
    """Unsigned codes [rows, columns] with zero in the middle -> as scheme.py stores them."""
    if scheme.bits == 4:
        return pack(codes.to(torch.uint8))
    return (codes - 128).to(torch.int8)


def checked(scale: torch.Tensor) -> torch.Tensor:
    """The scales in float32. Raises `ValueError` for one that is zero, infinite or NaN."""
    scale32 = scale.float()
    bad = ~torch.isfinite(scale32) | (scale32 == 0)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"is {scale32[at].item()} at {list(at)}: scales must be finite and not 0")
    return scale32


def row_scale(header: Header, name: str, suffix: str, rows: int) -> Source:
    """A scale per tensor or per row, in any of the shapes that files use. The expected shape is the
    file's, if it is one of these; else the loader refuses it."""
    found, shapes = header(f"{name}.{suffix}"), ((), (1,), (1, 1), (rows,), (rows, 1))
    shape = found[0] if found is not None and found[0] in shapes else (rows, 1)

    def convert(scale: torch.Tensor) -> list[torch.Tensor]:
        return [checked(scale).reshape(-1, 1).expand(rows, 1)]

    return Source(suffix, shape, torch.float32, ("scale",), convert)


def input_scale(header: Header, name: str) -> Source:
    """One scale for all activations of a layer."""
    found = header(f"{name}.input_scale")
    shape = (1,) if found is not None and found[0] == (1,) else ()
    return Source(
        "input_scale",
        shape,
        torch.float32,
        ("input_scale",),
        lambda scale: [checked(scale).reshape(1, 1)],
    )


def fp8_weight(rows: int, columns: int) -> Source:
    return Source("weight", (rows, columns), FP8, ("weight",), matrix=Matrix())


class ActOrder:
    """Sorts columns by group, if a file has the group of each column (`g_idx`).

    The order is known once `g_idx` is read, which comes before the codes.
    """

    def __init__(self, columns: int, group: int | None, is_sorted: bool) -> None:
        self._columns = columns
        self._group = group or columns
        self._is_sorted = is_sorted
        self._order: torch.Tensor | None = None

    def source(self, suffix: str) -> Source:
        fields = () if self._is_sorted else ("order",)
        return Source(suffix, (self._columns,), torch.int32, fields, self._convert)

    def sort(self, codes: torch.Tensor) -> torch.Tensor:
        """[rows, columns] with the columns in stored order."""
        return codes if self._order is None else codes[:, self._order]

    def _convert(self, g_idx: torch.Tensor) -> list[torch.Tensor]:
        order = torch.argsort(g_idx, stable=True)
        groups = torch.arange(self._columns, device=g_idx.device) // self._group
        if not torch.equal(g_idx[order].long(), groups):
            raise ValueError(f"does not name each of {int(groups[-1]) + 1} groups equally often")
        if self._is_sorted:
            if not torch.equal(g_idx.long(), groups):
                raise ValueError("is not in order, but config.json says desc_act false")
            return []
        self._order = order
        return [order.to(torch.int32).unsqueeze(0)]
