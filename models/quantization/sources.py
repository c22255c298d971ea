"""Pieces that the readers of several formats share: unpacking, checked scales, act-order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.models.quantization.method import Matrix, Source
from asyncllm.models.quantization.scheme import FP8, Scheme, pack

WORD_BITS = 32
Header = Callable[[str], tuple[tuple[int, ...], torch.dtype] | None]


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned codes int32 of int32 words along `dim` 0 or 1, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)  # [a, b, per word]
    return codes.flatten(1) if dim == 1 else codes.transpose(1, 2).flatten(0, 1)


def stored(scheme: Scheme, codes: torch.Tensor) -> torch.Tensor:
    """Unsigned codes [rows, columns], whose middle is zero, as the form has them."""
    if scheme.bits == 4:
        return pack(codes.to(torch.uint8))
    return (codes - 128).to(torch.int8)


def checked(scale: torch.Tensor) -> torch.Tensor:
    """Raises `ValueError` for a scale that makes weights of nothing."""
    scale32 = scale.float()
    bad = ~torch.isfinite(scale32) | (scale32 == 0)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"is {scale32[at].item()} at {list(at)}: scales must be finite and not 0")
    return scale32


def expand_blocks(scale: torch.Tensor, rows: int, block_rows: int) -> torch.Tensor:
    """[blocks of rows, groups] -> [rows, groups]."""
    return scale.repeat_interleave(block_rows, dim=0)[:rows]


def row_scale(
    header: Header, name: str, suffix: str, rows: int, dtype: torch.dtype = torch.float32
) -> Source:
    """A scale of a whole tensor or of each row, in any of the shapes that files have for it. What
    the file has is asked for; the loader refuses all else."""
    found = header(f"{name}.{suffix}")
    shape = found[0] if found is not None and found[0] in _row_shapes(rows) else (rows, 1)

    def convert(scale: torch.Tensor) -> list[torch.Tensor]:
        return [checked(scale).reshape(-1, 1).expand(rows, 1)]

    return Source(suffix, shape, dtype, ("scale",), convert)


def _row_shapes(rows: int) -> tuple[tuple[int, ...], ...]:
    return (), (1,), (1, 1), (rows,), (rows, 1)


def input_scale(header: Header, name: str) -> Source:
    """A scale of all activations of a layer."""
    found = header(f"{name}.input_scale")
    shape = (1,) if found is not None and found[0] == (1,) else ()
    return Source(
        "input_scale",
        shape,
        torch.float32,
        ("input_scale",),
        lambda scale: [checked(scale).reshape(1, 1)],
    )


def fp8_weight(rows: int, columns: int, suffix: str = "weight") -> Source:
    return Source(suffix, (rows, columns), FP8, ("weight",), matrix=Matrix())


class ActOrder:
    """Columns sorted by their group, where a file says the group of each (`g_idx`).

    The order is known when `g_idx` has been read, before the codes.
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
        """The columns of [rows, columns] in the order in which they are stored."""
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
