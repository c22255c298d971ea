"""The CUDA kernel of token masks: `apply_masks_torch` in one pass over the masked rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.worker.token_masks import LEAST_LOGIT, RowMasks

BLOCK = 4096  # logits per program


@triton.jit
def _mask_block(
    logits_ptr, of_row_ptr, bits_ptr, vocab_size, row_stride, bits_stride,
    LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row."""
    row = tl.program_id(0)
    place = tl.load(of_row_ptr + row)
    if place >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        words = tl.load(bits_ptr + place.to(tl.int64) * bits_stride + token // 32, inside, other=0)
        allowed = ((words >> (token % 32)) & 1) != 0
        logit_ptr = logits_ptr + row.to(tl.int64) * row_stride + token
        x = tl.load(logit_ptr, inside, other=0.0)
        x = tl.where(x < LEAST, LEAST, x)  # keeps a NaN
        tl.store(logit_ptr, tl.where(allowed, x, float("-inf")), inside)


def apply_masks_triton(logits: torch.Tensor, masks: RowMasks) -> None:
    """`ApplyMasks`."""
    num_blocks = triton.cdiv(logits.shape[1], BLOCK)
    _mask_block[(len(logits), num_blocks)](
        logits, masks.of_row, masks.bits, logits.shape[1], logits.stride(0), masks.bits.stride(0),
        LEAST=LEAST_LOGIT, BLOCK=BLOCK,
    )  # fmt: skip
