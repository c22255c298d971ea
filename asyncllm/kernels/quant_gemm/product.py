"""The inner product of one tile in Triton: rows of x times features of a matrix in any format.

The matrix is [features, WIDTH], in 16 bits, as bytes, or as words of eight codes of four bits
(words.py).
Codes are multiplied as they are, exactly, and the sum over a group of columns by its scale. In
bfloat16 codes become numbers by a few operations on two at a time (`fast_codes`), else by
arithmetic or a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# How a weight is stored: PLAIN 16 bits, BYTES int8 or e4m3, INT4 8 is zero, FP4 e2m1, TABLE.
PLAIN, BYTES, INT4, FP4, TABLE = range(5)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}  # `activate`


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and features of a program, columns at a time (of four bits: a chunk), parts of them."""

    rows: int
    features: int
    block: int
    num_warps: int
    num_stages: int
    splits: int = 1


_BEGIN = (
    "{{ .reg .b32 lo, hi, t, u, a, b; mov.b32 a, {}; mov.b32 b, {};"
    "prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632;"
)


def _int4_asm() -> str:
    """128 + code by its bits alone, then less 136: two words' codes, two at a time."""
    lines = [_BEGIN.format("0x3f803f80", "0xc308c308")]
    for plane in range(8):
        source, shift = ("lo", "hi")[plane // 4], 4 * (plane % 4)
        lines.append(f"shr.b32 t, {source}, {shift}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"fma.rn.bf16x2 ${plane}, t, a, b;")
    return " ".join((*lines, "}"))


def _fp4_asm() -> str:
    """Sign, exponent and mantissa to their places, then times 2 ** 126: also of subnormals."""
    lines = [_BEGIN.format("0x7e807e80", "0x80008000")]
    for plane in range(8):
        source, at = ("lo", "hi")[plane // 4], 4 * (plane % 4)
        lines.append(f"shl.b32 t, {source}, {12 - at}; and.b32 t, t, 0x80008000;")
        by = f"shl.b32 u, {source}, {6 - at};" if at < 6 else f"shr.b32 u, {source}, {at - 6};"
        lines.append(f"{by} lop3.b32 t, u, 0x01c001c0, t, 0xea;")
        lines.append(f"fma.rn.bf16x2 ${plane}, t, a, b;")
    return " ".join((*lines, "}"))


_INT4_ASM = tl.constexpr(_int4_asm())
_FP4_ASM = tl.constexpr(_fp4_asm())
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 2))


@triton.jit
def fast_codes(words, FORMAT: tl.constexpr):
    """int32 words -> the eight codes of each as bfloat16 numbers."""
    asm: tl.constexpr = _INT4_ASM if FORMAT == 2 else _FP4_ASM
    return tl.inline_asm_elementwise(
        asm, _CONSTRAINTS, [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
               tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _code(words, plane: tl.constexpr, table_ptr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    code = (words >> (4 * plane)) & 15
    if FORMAT == 2:
        return (code - 8).to(tl.float32).to(dtype)
    return tl.load(table_ptr + code).to(dtype)


@triton.jit
def _codes(words, table_ptr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    return (
        _code(words, 0, table_ptr, FORMAT, dtype), _code(words, 1, table_ptr, FORMAT, dtype),
        _code(words, 2, table_ptr, FORMAT, dtype), _code(words, 3, table_ptr, FORMAT, dtype),
        _code(words, 4, table_ptr, FORMAT, dtype), _code(words, 5, table_ptr, FORMAT, dtype),
        _code(words, 6, table_ptr, FORMAT, dtype), _code(words, 7, table_ptr, FORMAT, dtype),
    )  # fmt: skip


@triton.jit
def _add_words(
    acc, weight_ptr, scale_ptr, offset_ptr, table_ptr, rows_ptr, is_row, feature, inside, number,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    E8M0: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, TILE] plus one chunk's product. GROUP 0: a scale for all columns."""
    ROWS: tl.constexpr = rows_ptr.shape[0]
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    chunks: tl.constexpr = (WIDTH + 127) // 128
    word = tl.arange(0, 16)
    tiles = feature // 8 * (chunks * 128) + feature % 8 * 16
    at = tiles[None, :] + number * 128 + word[:, None]
    words = tl.load(weight_ptr + at, inside[None, :], other=0)
    codes = fast_codes(words, FORMAT) if FAST else _codes(words, table_ptr, FORMAT, dtype)
    num_groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP if GROUP > 0 else 1
    is_small: tl.constexpr = GROUP > 0 and GROUP < 128
    planes: tl.constexpr = GROUP // 16 if is_small else 8  # codes of a word that share a scale
    # Of many rows it is cheaper to multiply the codes than the sums, if less exact.
    scale_codes: tl.constexpr = is_small and ROWS >= 64
    first = number * 128
    exponents = tl.zeros_like(feature).to(tl.int32)
    if E8M0:  # four groups of 32, a byte each
        exponents = tl.load(scale_ptr + feature * chunks + number, inside, other=0)
    for start in tl.static_range(0, 8, planes):
        scale = tl.full(feature.shape, 1.0, tl.float32)
        group = 0
        if GROUP > 0:
            group = (first + start * 16) // GROUP
        has_group = inside & (group < num_groups)
        if E8M0:
            bits = ((exponents >> (start // planes * 8)) & 255) << 23
            scale = bits.to(tl.float32, bitcast=True)
        elif GROUP > 0:
            at_group = scale_ptr + feature * num_groups + group
            scale = tl.load(at_group, has_group, other=0.0).to(tl.float32)
        part = tl.zeros_like(acc) if GROUP > 0 and not scale_codes else acc
        sums = tl.zeros((ROWS,), tl.float32)
        for plane in tl.static_range(start, start + planes):
            column = (first + plane * 16 + word)[None, :]
            x_inside = is_row[:, None]
            if WIDTH % 128 != 0:
                x_inside = x_inside & (column < WIDTH)
            x = tl.load(rows_ptr + column, x_inside, other=0.0)
            code = codes[plane]
            if scale_codes:
                code *= scale.to(dtype)[None, :]
            part = tl.dot(x, code, part)
            if OFFSET:
                sums += tl.sum(x.to(tl.float32), axis=1)
        if GROUP > 0 and not scale_codes:
            acc += part * scale[None, :]
        else:
            acc = part
        if OFFSET:
            at_group = offset_ptr + feature * num_groups + group
            offset = tl.load(at_group, has_group, other=0.0).to(tl.float32)
            acc += sums[:, None] * offset[None, :]
    return acc


@triton.jit
def _add_columns(
    acc, weight_ptr, scale_ptr, offset_ptr, rows_ptr, is_row, feature, inside, number,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, TILE] plus BLOCK columns' product, of a matrix in 16 bits or in bytes."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    column = number * BLOCK + tl.arange(0, BLOCK)
    in_rows = is_row[:, None]
    in_weight = inside[None, :]
    if WIDTH % BLOCK != 0:
        in_rows = in_rows & (column < WIDTH)[None, :]
        in_weight = in_weight & (column < WIDTH)[:, None]
    x = tl.load(rows_ptr + column[None, :], in_rows, other=0.0)
    weight = tl.load(weight_ptr + feature[None, :] * WIDTH + column[:, None], in_weight, other=0.0)
    if FORMAT == 1:
        weight = weight.to(tl.float32).to(dtype)
    if GROUP == 0:
        acc = tl.dot(x, weight, acc)
    else:
        num_groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        group = feature * num_groups + number * BLOCK // GROUP
        part = tl.dot(x, weight)
        part *= tl.load(scale_ptr + group, inside, other=0.0).to(tl.float32)[None, :]
        if OFFSET:
            offset = tl.load(offset_ptr + group, inside, other=0.0).to(tl.float32)
            part += tl.sum(x.to(tl.float32), axis=1)[:, None] * offset[None, :]
        acc += part
    return acc


@triton.jit
def multiply(
    weight_ptr, scale_ptr, offset_ptr, table_ptr, rows_ptr, is_row, start, feature, inside, up,
    first, end,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    OFFSET: tl.constexpr, E8M0: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums [ROWS, TILE] of the features `start` + `feature`, and, GATED, of those that lie `up`
    behind, over blocks `first` to `end` of BLOCK columns. A scale for all columns is left to the
    caller. rows_ptr: [ROWS, 1], where the rows begin. start: of words a multiple of 8."""
    if FORMAT >= 2:
        weight_ptr += start * ((WIDTH + 127) // 128 * 16)
    else:
        weight_ptr += start * WIDTH
    if E8M0:
        scale_ptr += start * ((WIDTH + 127) // 128)
    elif GROUP > 0:
        scale_ptr += start * ((WIDTH + GROUP - 1) // GROUP)
        if OFFSET:
            offset_ptr += start * ((WIDTH + GROUP - 1) // GROUP)
    ROWS: tl.constexpr = rows_ptr.shape[0]
    TILE: tl.constexpr = feature.shape[0]
    acc = tl.zeros((ROWS, TILE), tl.float32)
    up_acc = tl.zeros((ROWS, TILE), tl.float32)
    for number in tl.range(first, end, num_stages=STAGES):
        if FORMAT >= 2:
            acc = _add_words(
                acc, weight_ptr, scale_ptr, offset_ptr, table_ptr, rows_ptr, is_row, feature,
                inside, number, WIDTH, GROUP, FORMAT, OFFSET, E8M0, FAST,
            )  # fmt: skip
            if GATED:
                up_acc = _add_words(
                    up_acc, weight_ptr, scale_ptr, offset_ptr, table_ptr, rows_ptr, is_row,
                    feature + up, inside, number, WIDTH, GROUP, FORMAT, OFFSET, E8M0, FAST,
                )  # fmt: skip
        else:
            acc = _add_columns(
                acc, weight_ptr, scale_ptr, offset_ptr, rows_ptr, is_row, feature, inside, number,
                WIDTH, GROUP, BLOCK, FORMAT, OFFSET,
            )  # fmt: skip
            if GATED:
                up_acc = _add_columns(
                    up_acc, weight_ptr, scale_ptr, offset_ptr, rows_ptr, is_row, feature + up,
                    inside, number, WIDTH, GROUP, BLOCK, FORMAT, OFFSET,
                )  # fmt: skip
    return acc, up_acc


@triton.jit
def activate(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """activation(gate) * up. ACTIVATION: 0 silu, 1 gelu_tanh, 2 clamped, as `Activation` has it."""
    if ACTIVATION == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate / (1 + tl.exp(-alpha * gate)) * up
    elif ACTIVATION == 1:  # tanh by exp
        cubic = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-cubic)) * up
    else:
        gate = gate / (1 + tl.exp(-gate)) * up
    return gate
