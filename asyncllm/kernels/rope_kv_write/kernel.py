"""One Triton kernel for all between a layer's projection and its attention.

Normalises and rotates the heads of q and k, and writes k and v straight to their pages: what would
otherwise be four kernels per layer and two passes over k and v. The reference is
attention/heads.py.

It is launched programmatically for the sake of decode kernels after it, which then begin early.
Asking for anything before its own wait cost steps of many tokens what it saved those of few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from asyncllm.kernels.declaration import Start
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import AttentionLayer, HeadNorm, RotatedHeads, Rotation

MAX_HEADS_PER_PROGRAM = 16
FEW_TOKENS = 64  # up to here one program per head: a small step must still fill the GPU


@triton.jit
def _stored(x, scale, LARGEST: tl.constexpr):
    """As pages have it: in FP8, of which LARGEST is the largest number, divided by the scale."""
    if LARGEST is not None:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -LARGEST), LARGEST)
    return x


# Of which a program reads one number: whether they are aligned makes no other variant.
SCALARS = ["slots_ptr", "rows_ptr"]


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _heads_kernel(
    qkv_ptr, q_ptr, cache_ptr, slots_ptr, rows_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr,
    eps, page_stride, kv_stride, k_scale, v_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        start_next()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    column = tl.arange(0, PADDED)[None, :]  # [1, PADDED], half a head
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    half = column < HALF
    if PDL:
        after = wait_previous()
        qkv_ptr += after
        q_ptr += after
        cache_ptr += after
        cos_sin_ptr += after
        slots_ptr += after
        rows_ptr += after
    slot = tl.load(slots_ptr + token)
    angle = cos_sin_ptr + tl.load(rows_ptr + token).to(tl.int64) * (2 * HALF) + column
    cos = tl.load(angle, half, other=0.0)
    sin = tl.load(angle + HALF, half, other=0.0)
    source = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + column
    raw1 = tl.load(source, mask, other=0.0)
    raw2 = tl.load(source + HALF, mask, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if HAS_NORM:
        q1 = tl.load(q_weight_ptr + column, half, other=0.0)
        q2 = tl.load(q_weight_ptr + HALF + column, half, other=0.0)
        k1 = tl.load(k_weight_ptr + column, half, other=0.0)
        k2 = tl.load(k_weight_ptr + HALF + column, half, other=0.0)
        mean = tl.sum(x1 * x1 + x2 * x2, axis=1)[:, None] / (2 * HALF)
        scale = tl.rsqrt(mean + eps)
        x1 = x1 * scale * tl.where(is_q, q1, k1).to(tl.float32)
        x2 = x2 * scale * tl.where(is_q, q2, k2).to(tl.float32)
    y1 = tl.where(is_v, raw1, (x1 * cos - x2 * sin).to(raw1.dtype))
    y2 = tl.where(is_v, raw2, (x2 * cos + x1 * sin).to(raw2.dtype))

    q_target = q_ptr + (token * NUM_HEADS + head) * (2 * HALF) + column
    tl.store(q_target, y1, mask & is_q)
    tl.store(q_target + HALF, y2, mask & is_q)
    position = (slot // BLOCK_SIZE) * page_stride + (slot % BLOCK_SIZE) * (NUM_KV_HEADS * 2 * HALF)
    kv_head = tl.where(is_v, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    which = tl.where(is_v, 1, 0) * kv_stride
    kv_target = cache_ptr + position + which + kv_head * (2 * HALF) + column
    kv_scale = tl.where(is_v, v_scale, k_scale)
    page_type = cache_ptr.dtype.element_ty
    tl.store(kv_target, _stored(y1, kv_scale, LARGEST).to(page_type), mask & (head >= NUM_HEADS))
    y2 = _stored(y2, kv_scale, LARGEST)
    tl.store(kv_target + HALF, y2.to(page_type), mask & (head >= NUM_HEADS))


def rotate_and_write(
    layer: AttentionLayer,
    qkv: torch.Tensor | RotatedHeads,
    rotation: Rotation | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Rotated q [tokens, num_heads, head_dim], contiguous; rotated k and v into the cache.

    qkv as `Attend` takes it. cache: one layer's [pages, 2, block_size, num_kv_heads, head_dim],
    contiguous; slots: int64 [tokens], flat positions page * block_size + offset. `q`: where to
    put q; a new tensor if None. scales: of keys and values, by which they are divided in FP8.
    """
    if isinstance(qkv, RotatedHeads):
        return _write_rotated(layer, qkv, cache, slots, q, scales)
    assert rotation is not None
    num_tokens, all_heads, head_dim = qkv.shape
    if q is None:
        q = qkv.new_empty((num_tokens, layer.num_heads, head_dim))
    heads = 1
    if num_tokens > FEW_TOKENS:
        heads = min(triton.next_power_of_2(all_heads), MAX_HEADS_PER_PROGRAM)
    norm = layer.head_norm
    _heads_kernel[(num_tokens, triton.cdiv(all_heads, heads))](
        qkv, q, cache, slots, rotation.rows, rotation.cos_sin,
        norm.q_weight if norm is not None else qkv, norm.k_weight if norm is not None else qkv,
        norm.eps if norm is not None else 0.0, cache.stride(0), cache.stride(1), *scales,
        NUM_HEADS=layer.num_heads, NUM_KV_HEADS=layer.num_kv_heads, HALF=head_dim // 2,
        PADDED=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=cache.shape[2], HEADS=heads,
        HAS_NORM=norm is not None, LARGEST=_largest(cache), num_warps=1 if heads == 1 else 4,
        **launch_flags(qkv.device),
    )  # fmt: skip
    return q


def _largest(cache: torch.Tensor) -> float | None:
    return torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else None


@triton.jit
def _rotated_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, cache_ptr, slots_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    page_stride, kv_stride, k_scale, v_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    GIVEN_KV_HEADS: tl.constexpr, GIVEN_GROUP: tl.constexpr, GIVEN_DIM: tl.constexpr,
    GIVEN_V_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """As _heads_kernel without its arithmetic, and with zeros behind what is given."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    column = tl.arange(0, PADDED)[None, :]
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    slot = tl.load(slots_ptr + token)
    of_q = head // GROUP * GIVEN_GROUP + head % GROUP  # its place among the given ones
    has_q = is_q & (head // GROUP < GIVEN_KV_HEADS) & (head % GROUP < GIVEN_GROUP)
    q = tl.load(
        q_ptr + token * q_stride + of_q * q_head_stride + column,
        has_q & (column < GIVEN_DIM), other=0.0,
    )  # fmt: skip
    target = q_out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + column
    tl.store(target, q, is_q & (column < HEAD_DIM))

    of_k = head - NUM_HEADS
    k = tl.load(
        k_ptr + token * k_stride + of_k * k_head_stride + column,
        is_k & (of_k < GIVEN_KV_HEADS) & (column < GIVEN_DIM), other=0.0,
    )  # fmt: skip
    position = (slot // BLOCK_SIZE) * page_stride + (slot % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
    kv = cache_ptr + position + column
    page_type = cache_ptr.dtype.element_ty
    k = _stored(k, k_scale, LARGEST).to(page_type)
    tl.store(kv + of_k * HEAD_DIM, k, is_k & (column < HEAD_DIM))
    of_v = of_k - NUM_KV_HEADS
    is_v = is_v & (of_v < NUM_KV_HEADS)
    v = tl.load(
        v_ptr + token * v_stride + of_v * v_head_stride + column,
        is_v & (of_v < GIVEN_KV_HEADS) & (column < GIVEN_V_DIM), other=0.0,
    )  # fmt: skip
    v = _stored(v, v_scale, LARGEST).to(page_type)
    tl.store(kv + kv_stride + of_v * HEAD_DIM, v, is_v & (column < HEAD_DIM))


def _write_rotated(
    layer: AttentionLayer,
    heads: RotatedHeads,
    cache: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor | None,
    scales: tuple[float, float],
) -> torch.Tensor:
    """`rotate_and_write` of heads that are rotated."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in heads)
    num_tokens, kv_heads, head_dim = len(q), layer.num_kv_heads, layer.head_dim
    if q_out is None:
        q_out = q.new_empty((num_tokens, layer.num_heads, head_dim))
    all_heads, per_program = layer.num_heads + 2 * kv_heads, 1
    if num_tokens > FEW_TOKENS:
        per_program = min(triton.next_power_of_2(all_heads), MAX_HEADS_PER_PROGRAM)
    _rotated_kernel[(num_tokens, triton.cdiv(all_heads, per_program))](
        q, k, v, q_out, cache, slots,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cache.stride(0), cache.stride(1), *scales,
        NUM_KV_HEADS=kv_heads, GROUP=layer.num_heads // kv_heads, HEAD_DIM=head_dim,
        GIVEN_KV_HEADS=k.shape[1], GIVEN_GROUP=q.shape[1] // k.shape[1], GIVEN_DIM=q.shape[2],
        GIVEN_V_DIM=v.shape[2], PADDED=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=cache.shape[2], HEADS=per_program, LARGEST=_largest(cache),
        num_warps=1 if per_program == 1 else 4,
    )  # fmt: skip
    return q_out


def prewarm(start: Start) -> Iterator[Callable[[], object]]:
    """One head to a program, and several."""
    if start.layers and start.layers[0].latent_dim is None and start.attention_backend != "torch":
        yield from (partial(_rotate_zeros, start, tokens) for tokens in (1, 2 * FEW_TOKENS))


def _rotate_zeros(start: Start, num_tokens: int) -> None:
    layer, dtype = start.layers[0], start.dtype
    kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    if layer.head_norm is not None:  # whose weights may be without memory
        weights = start.zeros(2, head_dim, dtype=layer.head_norm.q_weight.dtype)
        layer = replace(layer, head_norm=HeadNorm(weights[0], weights[1], 1.0))
    rotate_and_write(
        layer,
        start.zeros(num_tokens, layer.num_heads + 2 * kv_heads, head_dim, dtype=dtype),
        Rotation(start.zeros(num_tokens), start.zeros(1, head_dim, dtype=torch.float32)),
        start.zeros(1, 2, start.block_size, kv_heads, head_dim, dtype=start.kv_dtype),
        start.zeros(num_tokens, dtype=torch.int64),
    )
