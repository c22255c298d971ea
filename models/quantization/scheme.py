"""How quantised matrices are stored in memory, whatever their file format.

    weight  [rows, columns]  of `kind`: e4m3, int8, or 4-bit codes
    scale   [rows, groups]   float, or exponents of powers of two (e8m0); columns are divided into
                             groups, the last one may be short
    offset  [rows, groups]   float, if there are zero points
    order   int32 [columns]  input column of each stored one, if they are sorted (act-order)

    row r, column order[c] of the matrix  =  value(weight[r, c]) * scale[r, g(c)] + offset[r, g(c)]

A scale per tensor, or per 128x128 block, is repeated for its rows. `dequantize` is the reference
for all kernels; `quantize` converts from 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["fp8", "int8", "int4", "fp4", "nf4"]
Activations = Literal["dynamic", "static"]
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
E8M0_BIAS = 127
# Quantiles of the normal distribution, as in bitsandbytes.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; the other codes are their negatives
CODE_VALUES: dict[str, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "fp4": (*FP4_HALF, *(-value for value in FP4_HALF)),
    "nf4": NF4,
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer is quantised.

    group: columns that share a scale; None: the whole row. activations: how inputs are quantised,
    "dynamic" by each token's largest value, or "static" by a scale of the checkpoint; None: they
    stay in 16 bits. has_exponents: scales are bytes, 2 ** (byte - 127).
    """

    kind: Kind
    group: int | None = None
    has_offset: bool = False
    has_order: bool = False
    activations: Activations | None = None
    has_exponents: bool = False

    @property
    def bits(self) -> int:
        return 8 if self.kind in ("fp8", "int8") else 4

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `weight` in memory; two 4-bit codes share a byte."""
        return {"fp8": FP8, "int8": torch.int8}.get(self.kind, torch.uint8)

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of `scale` in a model of this dtype. A scale of a whole row multiplies sums, in
        float32, as all scales of e4m3 do; one of a group multiplies weights, in their dtype."""
        if self.has_exponents:
            return torch.uint8
        return torch.float32 if self.group is None or self.kind == "fp8" else dtype

    def num_groups(self, columns: int) -> int:
        return -(-columns // (self.group or columns))

    def __str__(self) -> str:
        what = f"{self.kind} in groups of {self.group}" if self.group else self.kind
        return what if self.activations is None else f"{what}, {self.activations} activations"


def pack(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes uint8 [rows, columns] -> [rows, columns / 2]; earlier columns in the low bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def values(scheme: Scheme, weight: torch.Tensor) -> torch.Tensor:
    """The values of a stored weight: float32 [rows, columns]."""
    if scheme.bits == 8:
        return weight.float()
    table = torch.tensor(CODE_VALUES[scheme.kind], device=weight.device)
    return table[unpack(weight).int()]


def dequantize(
    scheme: Scheme,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matrix, float32 [rows, columns]."""
    made = values(scheme, weight)
    columns = made.shape[1]
    made *= _by_column(scheme, scale, columns)
    if offset is not None:
        made += _by_column(scheme, offset, columns)
    return made


def _by_column(scheme: Scheme, by_group: torch.Tensor, columns: int) -> torch.Tensor:
    if by_group.dtype == torch.uint8:
        by_group = torch.exp2(by_group.float() - E8M0_BIAS)
    if scheme.group is None:
        return by_group.float()
    return by_group.float().repeat_interleave(scheme.group, dim=1)[:, :columns]


def quantize(scheme: Scheme, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [rows, columns] symmetrically: the stored weight, and the scale in float32. Columns
    must be a multiple of the group. A group of zeros has scale 1."""
    rows, columns = matrix.shape
    grouped = matrix.float().view(rows, scheme.num_groups(columns), -1)
    most = grouped.abs().amax(2)
    largest = {"fp8": FP8_MAX, "int8": 127.0, "int4": 7.0, "fp4": 6.0, "nf4": 1.0}[scheme.kind]
    scale = torch.where(most > 0, most / largest, 1.0)
    scaled = (grouped / scale.unsqueeze(2)).view(rows, columns)
    if scheme.kind == "fp8":
        return scaled.to(FP8), scale
    if scheme.kind == "int8":
        return scaled.round_().to(torch.int8), scale
    if scheme.kind == "int4":
        return pack((scaled.round_() + 8).to(torch.uint8)), scale
    table = torch.tensor(CODE_VALUES[scheme.kind], device=matrix.device)
    return pack((scaled.unsqueeze(2) - table).abs_().argmin(2).to(torch.uint8)), scale


def quantize_rows(kind: Kind, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations [tokens, columns] by each token's largest value: e4m3 or int8, and
    scales float32 [tokens, 1]."""
    return quantize(Scheme(kind), x)
