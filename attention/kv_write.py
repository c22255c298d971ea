"""A Triton kernel that puts a step's keys and values into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, slots_ptr, cache_ptr,
    k_stride, v_stride, page_stride, kv_stride,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, ROW_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    page = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    column = tl.arange(0, ROW_PADDED)
    mask = column < ROW
    target = cache_ptr + page * page_stride + offset * ROW + column
    tl.store(target, tl.load(k_ptr + token * k_stride + column, mask), mask)
    tl.store(target + kv_stride, tl.load(v_ptr + token * v_stride + column, mask), mask)


def write_kv(cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """k, v [tokens, kv_heads, head_dim] to flat positions `slots` int64 [tokens] of one layer.

    cache: [pages, 2, block_size, kv_heads, head_dim], contiguous. The last two dimensions of k
    and v are contiguous; their rows may be strided.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    row = num_kv_heads * head_dim
    _write_kernel[(num_tokens,)](
        k, v, slots, cache,
        k.stride(0), v.stride(0), cache.stride(0), cache.stride(1),
        BLOCK_SIZE=cache.shape[2], ROW=row, ROW_PADDED=triton.next_power_of_2(row),
    )  # fmt: skip
