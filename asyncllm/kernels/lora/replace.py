"""Whole weights of adapters in Triton: the product of rows whose slots have one is made by it.

product[t, features] = whole[slot of t] @ x[t]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import AdapterRows, LoRAWeights

WHOLE_COLUMNS = 64  # of x, at a time
WHOLE_FEATURES = 64  # of a whole weight, to a program


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _replace(
    x_ptr, weight_ptr, is_there_ptr, rows_ptr, tiles_ptr, product_ptr, in_features, features,
    product_stride, weight_stride, is_there_stride,
    TILE: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some features of a tile. product_ptr: at the first feature."""
    if PDL:
        start_next()
    tile = tl.program_id(1)
    slot = (tl.load(tiles_ptr + tile) // 2).to(tl.int64)
    row = tl.load(rows_ptr + tile * TILE + tl.arange(0, TILE))
    if tl.load(is_there_ptr + slot * is_there_stride) == 0:
        if PDL:
            wait_previous()
        return
    if PDL:
        after = wait_previous()
        x_ptr += after
        product_ptr += after
    is_row, row = row >= 0, row.to(tl.int64)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < features
    weight_ptr += slot * weight_stride + feature.to(tl.int64)[None, :] * in_features
    x_ptr += row[:, None] * in_features
    sums = tl.zeros((TILE, FEATURES), tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        given = column < in_features
        x = tl.load(x_ptr + column[None, :], is_row[:, None] & given[None, :], other=0.0)
        weight = tl.load(weight_ptr + column[:, None], given[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="tf32x3")
    product_ptr += row[:, None] * product_stride + feature[None, :]
    rounded = sums.to(product_ptr.dtype.element_ty)
    tl.store(product_ptr, rounded, is_row[:, None] & inside[None, :])


def replace(
    product: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, rows: AdapterRows
) -> None:
    """In the product [T, out], contiguous: what rows' slots have whole weights for."""
    in_features, (num_tiles, tile) = x.shape[1], rows.rows.shape
    assert x.is_contiguous() and product.is_contiguous()
    for whole in weights.whole:
        features = whole.weight.shape[1]
        _replace[(triton.cdiv(features, WHOLE_FEATURES), num_tiles)](
            x, whole.weight, whole.is_there, rows.rows, rows.tiles[weights.index],
            product[:, whole.first :], in_features, features, product.stride(0),
            whole.weight.stride(0), whole.is_there.stride(0), TILE=tile, FEATURES=WHOLE_FEATURES,
            COLUMNS=WHOLE_COLUMNS, **launch_flags(product.device),
        )  # fmt: skip
