"""A layer's experts for few tokens in Triton: each assignment's row alone, without tensor cores.

Tensor cores take 16 rows where an expert has one, and codes of four bits reach them by way of
shared memory. Here a program sums some features of one assignment (quant_gemm/gemv.py), and an
expert that two tokens take is read twice, the second time from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.quant_gemm.gemv import places_of_rows, sums_of_rows
from asyncllm.kernels.quant_gemm.matrix import Quantized, is_fast
from asyncllm.kernels.quant_gemm.product import ACTIVATIONS, BYTES, INT4, PLAIN, activate
from asyncllm.kernels.records import Activation, Normed, Routed

TILE, WARPS = 4, 4  # by a sweep on an H200 (docs/log/experts.md)
BLOCKS = {PLAIN: 2048, BYTES: 1024, INT4: 64}  # columns at a time; words of four bits of any kind


@triton.jit(do_not_specialize=["first_expert"])
def _expert_row_kernel(
    x_ptr, squares_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr, bias_ptr, gates_ptr, out_ptr,
    ids_ptr, first_expert, num_squares, eps, limit, alpha,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    GROUP: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr, E8M0: tl.constexpr,
    FAST: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    SQUARES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As kernel.py's `_experts_kernel`."""
    NUM_TILES: tl.constexpr = (FEATURES + TILE - 1) // TILE
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        ids_ptr += after
        gates_ptr += after
        out_ptr += after
        if SQUARES:
            squares_ptr += after
    assignment = tl.program_id(0) // NUM_TILES
    feature = tl.program_id(0) % NUM_TILES * TILE + tl.arange(0, TILE)
    inside = feature < FEATURES
    source = assignment // TOP_K if GATED else assignment
    expert = tl.load(ids_ptr + assignment).to(tl.int64) - first_expert
    if (expert >= 0) & (expert < NUM_EXPERTS):  # else another rank has it
        at = expert * ((2 if GATED else 1) * FEATURES) + feature
        row, in_rows = at[:, None, None], inside[:, None, None]
        up_row = row + FEATURES
        place, weight = places_of_rows(weight_ptr, row, in_rows, WIDTH, FORMAT, BLOCK)
        up_place, up_weight = place, weight
        if GATED:
            up_place, up_weight = places_of_rows(weight_ptr, up_row, in_rows, WIDTH, FORMAT, BLOCK)
        acc, up = sums_of_rows(
            weight, up_weight, place, up_place, row, up_row, in_rows,
            x_ptr + source * WIDTH, weight_ptr, scale_ptr, offset_ptr, table_ptr,
            WIDTH, GROUP, FORMAT, OFFSET, E8M0, FAST, BLOCK, GATED,
        )  # fmt: skip
        if FORMAT != 0 and GROUP == 0:
            acc *= tl.load(scale_ptr + at, inside, other=0.0).to(tl.float32)
            if GATED:
                up *= tl.load(scale_ptr + at + FEATURES, inside, other=0.0).to(tl.float32)
        if SQUARES:
            part = tl.arange(0, SQUARES)
            squares = tl.load(
                squares_ptr + source * num_squares + part, part < num_squares, other=0.0
            )
            factor = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)
            acc *= factor
            up *= factor
        if HAS_BIAS:
            acc += tl.load(bias_ptr + at, inside, other=0.0).to(tl.float32)
            if GATED:
                up += tl.load(bias_ptr + at + FEATURES, inside, other=0.0).to(tl.float32)
        if GATED:
            acc = activate(acc, up, limit, alpha, ACTIVATION)
        else:
            acc *= tl.load(gates_ptr + assignment)
        target = out_ptr + assignment.to(tl.int64) * FEATURES + feature
        tl.store(target, acc.to(out_ptr.dtype.element_ty), inside)


def multiply_rows(
    x: Normed,
    matrix: Quantized,
    routed: Routed,
    out: torch.Tensor,
    activation: Activation | None,
    num_experts: int,
) -> None:
    """One product of each assignment: gate and up of x [tokens, columns], with the `activation`; or
    down of x [assignments, columns], times the gates. out: [assignments, features]."""
    ids, top_k = routed.ids, routed.ids.shape[1]
    num_squares = 0 if x.squares is None else x.squares.shape[1]
    limit, alpha = (0.0, 0.0) if activation is None else (activation.limit, activation.alpha)
    _expert_row_kernel[(ids.numel() * triton.cdiv(out.shape[1], TILE),)](
        x.values, x.squares, matrix.weight, matrix.scale, matrix.offset, matrix.table, matrix.bias,
        routed.gates, out, ids, routed.first_expert, num_squares, x.eps, limit, alpha,
        NUM_EXPERTS=num_experts, TOP_K=top_k, WIDTH=matrix.columns, FEATURES=out.shape[1],
        GROUP=matrix.group or 0, FORMAT=matrix.format, OFFSET=matrix.offset is not None,
        E8M0=matrix.is_e8m0,
        FAST=is_fast(x.values, matrix), GATED=activation is not None,
        ACTIVATION=ACTIVATIONS[activation.name] if activation is not None else 0,
        HAS_BIAS=matrix.bias is not None,
        SQUARES=triton.next_power_of_2(num_squares) if num_squares else 0,
        TILE=TILE, BLOCK=BLOCKS[min(matrix.format, INT4)],
        num_warps=WARPS, **launch_flags(out.device),
    )  # fmt: skip
