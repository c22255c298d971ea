"""A layer's experts in Triton: gate, up and activation in one grouped product, down in another.

A program multiplies rows of one expert by some of its features. Which rows are an expert's is known
on the device alone, and shapes depend on the number of tokens, so calls can be captured.

    one or two   each token's experts one by one (rows.py)
    few tokens   a row for each token; a program looks for its expert among the tokens' and leaves
                 where there is none. Only the weights of experts that are taken are read, once.
    more         two small kernels sort the rows by expert, each expert's padded to whole blocks

The results of a token's experts, times their gates, are rows of their own, which a last kernel
adds. Experts of other ranks (`Routed.own`) are passed over, and their rows not written. Sums are in
float32. Experts in plain torch are models/layers/torch_ops.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.experts.rows import multiply_rows
from asyncllm.kernels.experts.sort import sort_by_expert
from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.quant_gemm.matrix import Quantized, block_of, is_fast, plain_matrix
from asyncllm.kernels.quant_gemm.product import ACTIVATIONS, Tiles, activate, multiply
from asyncllm.kernels.records import Activation, ExpertWeights, Normed, Routed

MOST_SINGLE = 2  # tokens
FEW_TOKENS = 64  # a block of rows holds them all
MIN_ROWS = 16  # that a product of Triton's has
SUM_COLUMNS = 1024
WIDTH_MULTIPLE = 16  # of hidden size and experts' sizes


@triton.jit
def _rows_of_expert(
    ids_ptr, num_tokens, candidate, first_expert, BY_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The candidate's expert, NUM_EXPERTS where another program has it or nobody takes it; for each
    token which of its assignments takes it (token * TOP_K + place), and whether one does."""
    token = tl.arange(0, ROWS)
    place = tl.arange(0, TOP_K_PADDED)[None, :]
    index = token[:, None] * TOP_K + place
    inside = (token[:, None] < num_tokens) & (place < TOP_K)
    ids = tl.load(ids_ptr + index, inside, other=-1).to(tl.int32)
    ids -= first_expert
    expert = candidate
    if not BY_EXPERT:
        expert = tl.load(ids_ptr + candidate).to(tl.int32) - first_expert
    takes = ids == expert
    is_taken = tl.max(takes.to(tl.int32), axis=1)
    assignment = token * TOP_K + tl.sum(tl.where(takes, place, 0), axis=1)
    if BY_EXPERT:
        mine = tl.max(is_taken, axis=0) > 0
    else:
        mine = tl.max((takes & (index < candidate)).to(tl.int32)) == 0
        mine &= (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(mine, expert, NUM_EXPERTS), token, assignment, is_taken > 0


@triton.jit
def _sorted_rows(
    counts_ptr, order_ptr, block, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `_rows_of_expert`, of a block of sorted rows. order: assignment + 1, 0 for padding."""
    expert = tl.arange(0, EXPERTS_PADDED)
    counts = tl.load(counts_ptr + expert, expert < NUM_EXPERTS, other=0)
    ends = tl.cumsum((counts + ROWS - 1) // ROWS, axis=0)
    mine = tl.sum((ends <= block).to(tl.int32), axis=0)
    row = tl.arange(0, ROWS)
    # Of a block behind the last one nothing is used.
    last = tl.maximum(tl.max(ends, axis=0) - 1, 0)
    assignment = tl.load(order_ptr + tl.minimum(block, last) * ROWS + row) - 1
    is_row = assignment >= 0
    assignment = tl.where(is_row, assignment, 0)
    return tl.minimum(mine, NUM_EXPERTS), assignment // TOP_K, assignment, is_row


@triton.jit(do_not_specialize=["num_tokens", "first_expert"])  # any number: one variant for all
def _experts_kernel(
    x_ptr, squares_ptr, weight_ptr, scale_ptr, offset_ptr, table_ptr, bias_ptr, gates_ptr, out_ptr,
    ids_ptr, counts_ptr, order_ptr, num_tokens, first_expert, num_squares, eps, limit, alpha,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, OFFSET: tl.constexpr, E8M0: tl.constexpr, FAST: tl.constexpr,
    GATED: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SQUARES: tl.constexpr,
    SORTED: tl.constexpr, BY_EXPERT: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: gate and up of x [tokens, WIDTH] -> out [assignments, FEATURES]. Else down of
    x [assignments, WIDTH], times the gates. weight: [experts, (2 *) FEATURES, WIDTH], stored as
    quant_gemm/product.py says."""
    NUM_TILES: tl.constexpr = (FEATURES + TILE - 1) // TILE
    if PDL:
        start_next()
        after = wait_previous()
        x_ptr += after
        ids_ptr += after
        gates_ptr += after
        counts_ptr += after
        order_ptr += after
        out_ptr += after
        if SQUARES:
            squares_ptr += after
    candidate = tl.program_id(0) // NUM_TILES
    if SORTED:
        expert, token, assignment, is_row = _sorted_rows(
            counts_ptr, order_ptr, candidate, NUM_EXPERTS, EXPERTS_PADDED, TOP_K, ROWS
        )
    else:
        expert, token, assignment, is_row = _rows_of_expert(
            ids_ptr, num_tokens, candidate, first_expert, BY_EXPERT, NUM_EXPERTS, TOP_K,
            TOP_K_PADDED, ROWS,
        )  # fmt: skip
    if expert < NUM_EXPERTS:
        first = (tl.program_id(0) % NUM_TILES) * TILE
        feature = first + tl.arange(0, TILE)
        inside = feature < FEATURES
        source = token if GATED else assignment
        rows_ptr = x_ptr + source[:, None].to(tl.int64) * WIDTH
        start = expert.to(tl.int64) * ((2 if GATED else 1) * FEATURES) + first
        acc, up = multiply(
            weight_ptr, scale_ptr, offset_ptr, table_ptr, rows_ptr, is_row, start,
            tl.arange(0, TILE), inside, FEATURES, 0, (WIDTH + BLOCK - 1) // BLOCK,
            WIDTH, GROUP, BLOCK, FORMAT, OFFSET, E8M0, FAST, GATED, STAGES,
        )  # fmt: skip
        at = start + tl.arange(0, TILE)
        if FORMAT != 0 and GROUP == 0:
            acc *= tl.load(scale_ptr + at, inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_scale = tl.load(scale_ptr + at + FEATURES, inside, other=0.0).to(tl.float32)
                up *= up_scale[None, :]
        if SQUARES:
            part = tl.arange(0, SQUARES)
            in_part = is_row[:, None] & (part < num_squares)[None, :]
            at_part = source[:, None] * num_squares + part[None, :]
            squares = tl.sum(tl.load(squares_ptr + at_part, in_part, other=0.0), axis=1)
            factor = tl.rsqrt(squares / WIDTH + eps)[:, None]
            acc *= factor
            up *= factor
        if HAS_BIAS:
            acc += tl.load(bias_ptr + at, inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_bias = tl.load(bias_ptr + at + FEATURES, inside, other=0.0).to(tl.float32)
                up += up_bias[None, :]
        if GATED:
            acc = activate(acc, up, limit, alpha, ACTIVATION)
        else:
            acc *= tl.load(gates_ptr + assignment, is_row, other=0.0)[:, None]
        target = out_ptr + assignment[:, None].to(tl.int64) * FEATURES + feature[None, :]
        in_out = is_row[:, None] & inside[None, :]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), in_out)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    parts_ptr, out_ptr, ids_ptr, first_expert, SIZE: tl.constexpr, TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[tokens, TOP_K, SIZE] -> [tokens, SIZE]. NUM_EXPERTS 0: all experts are here."""
    if PDL:
        start_next()
        after = wait_previous()
        parts_ptr += after
        out_ptr += after
        ids_ptr += after
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(TOP_K):
        at = row * TOP_K + part
        is_here = inside
        if NUM_EXPERTS:
            expert = tl.load(ids_ptr + at).to(tl.int32) - first_expert
            is_here = inside & (expert >= 0) & (expert < NUM_EXPERTS)
        total += tl.load(parts_ptr + at * SIZE + column, is_here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, total.to(out_ptr.dtype.element_ty), inside)


def takes(weights: ExpertWeights) -> bool:
    """Half precision, and sizes that vector loads divide."""
    hidden, size = weights.down.shape[1:]
    is_half = weights.down.dtype in (torch.bfloat16, torch.float16)
    return is_half and hidden % WIDTH_MULTIPLE == 0 and size % WIDTH_MULTIPLE == 0


def experts(x: Normed, weights: ExpertWeights, routed: Routed) -> torch.Tensor:
    """`Ops.experts`."""
    num_experts, hidden, size = weights.down.shape
    gate_up = plain_matrix(weights.gate_up.view(-1, hidden), weights.gate_up_bias)
    down = plain_matrix(weights.down.view(-1, size), weights.down_bias)
    return experts_of(x, gate_up, down, num_experts, weights.activation, routed)


def experts_of(
    x: Normed,
    gate_up: Quantized,
    down: Quantized,
    num_experts: int,
    activation: Activation,
    routed: Routed,
) -> torch.Tensor:
    """The same in any format: [experts * 2 * size, hidden] and [experts * hidden, size], biases by
    their rows. Of sorted rows both products have tiles of equally many."""
    num_tokens, hidden = x.values.shape
    size, top_k = down.columns, routed.ids.shape[1]
    gated = x.values.new_empty((num_tokens * top_k, size))
    parts = x.values.new_empty((num_tokens * top_k, hidden))
    ids, gates = routed.ids, routed.gates
    assert ids.is_contiguous() and gates.is_contiguous() and x.values.is_contiguous()
    if num_tokens <= MOST_SINGLE:
        multiply_rows(x, gate_up, routed, gated, activation, num_experts)
        multiply_rows(Normed(gated), down, routed, parts, None, num_experts)
        return _sum(parts, x.values, routed, num_experts)
    num_all = num_experts if routed.own is None else routed.own.num_all
    gate_up_tiles = choose_tiles(num_tokens, top_k, num_all, gated=True)
    down_tiles = choose_tiles(num_tokens, top_k, num_all, gated=False)
    first_expert = routed.first_expert
    counts, order = ids, ids  # not read where there are few
    if num_tokens > FEW_TOKENS:
        assert gate_up_tiles.rows == down_tiles.rows
        counts, order = sort_by_expert(ids, num_experts, gate_up_tiles.rows, first_expert)
        num_candidates = len(order) // gate_up_tiles.rows
    else:
        num_candidates = min(ids.numel(), num_experts)
    products = (
        (x, gate_up, gated, gate_up_tiles),
        (Normed(gated), down, parts, down_tiles),
    )
    flags = launch_flags(ids.device)
    for source, matrix, target, tiles in products:
        num_squares = 0 if source.squares is None else source.squares.shape[1]
        num_tiles = triton.cdiv(target.shape[1], tiles.features)
        _experts_kernel[(num_candidates * num_tiles,)](
            source.values, source.squares, matrix.weight, matrix.scale, matrix.offset, matrix.table,
            matrix.bias, gates, target, ids, counts, order,
            num_tokens, first_expert, num_squares, source.eps, activation.limit, activation.alpha,
            NUM_EXPERTS=num_experts, EXPERTS_PADDED=triton.next_power_of_2(num_experts),
            TOP_K=top_k, TOP_K_PADDED=triton.next_power_of_2(top_k),
            WIDTH=matrix.columns, FEATURES=target.shape[1], GROUP=matrix.group or 0,
            FORMAT=matrix.format, OFFSET=matrix.offset is not None, E8M0=matrix.is_e8m0,
            FAST=is_fast(x.values, matrix), GATED=target is gated, STAGES=tiles.num_stages,
            ACTIVATION=ACTIVATIONS[activation.name], HAS_BIAS=matrix.bias is not None,
            SQUARES=triton.next_power_of_2(num_squares) if num_squares else 0,
            SORTED=num_tokens > FEW_TOKENS, BY_EXPERT=num_experts < ids.numel(),
            ROWS=tiles.rows, TILE=tiles.features, BLOCK=block_of(matrix, tiles.block),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **flags,
        )  # fmt: skip
    return _sum(parts, x.values, routed, num_experts)


def _sum(parts: torch.Tensor, like: torch.Tensor, routed: Routed, num_experts: int) -> torch.Tensor:
    """Over each token's assignments: [tokens, hidden], a new tensor as `like`."""
    num_tokens, hidden = like.shape
    out = torch.empty_like(like)
    _sum_kernel[(num_tokens, triton.cdiv(hidden, SUM_COLUMNS))](
        parts, out, routed.ids, routed.first_expert, SIZE=hidden, TOP_K=routed.ids.shape[1],
        NUM_EXPERTS=0 if routed.own is None else num_experts, BLOCK=SUM_COLUMNS, num_warps=4,
        **launch_flags(out.device),
    )  # fmt: skip
    return out


def choose_tiles(num_tokens: int, top_k: int, num_experts: int, gated: bool) -> Tiles:
    """By sweeps on an H100, weights from memory (docs/log/experts.md)."""
    if num_tokens <= FEW_TOKENS:
        rows = max(MIN_ROWS, triton.next_power_of_2(num_tokens))
        return Tiles(rows, 32 if num_tokens <= 16 else 64, 128, 4, 4)
    per_expert = num_tokens * top_k // num_experts
    if per_expert <= 16:
        return Tiles(32, 64, 128, 4, 3)
    if per_expert <= 32:
        return Tiles(64, 64 if gated else 128, 64, 4, 4)
    return Tiles(128, 128, 64, 8, 4 if gated else 3)
