"""Assignments of tokens to experts sorted by expert, on the device: two small kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PLACED = 128  # assignments to a program


@triton.jit(do_not_specialize=["num_assignments", "first_expert"])
def _count_kernel(
    ids_ptr, counts_ptr, ranks_ptr, num_assignments, first_expert, NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each assignment's number among those of its expert, in any order; how many an expert has."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_assignments
    expert = tl.load(ids_ptr + index, inside, other=0) - first_expert
    inside &= (expert >= 0) & (expert < NUM_EXPERTS)
    rank = tl.atomic_add(counts_ptr + expert, 1, inside, sem="relaxed")
    tl.store(ranks_ptr + index, rank, inside)


@triton.jit(do_not_specialize=["num_assignments", "first_expert"])
def _place_kernel(
    ids_ptr, counts_ptr, ranks_ptr, order_ptr, num_assignments, first_expert,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Assignments + 1 to their places in the order, where each expert begins a block."""
    expert = tl.arange(0, EXPERTS_PADDED)
    counts = tl.load(counts_ptr + expert, expert < NUM_EXPERTS, other=0)
    blocks = (counts + ROWS - 1) // ROWS
    starts = (tl.cumsum(blocks, axis=0) - blocks) * ROWS
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_assignments
    mine = tl.load(ids_ptr + index, inside, other=0) - first_expert
    inside &= (mine >= 0) & (mine < NUM_EXPERTS)
    rank = tl.load(ranks_ptr + index, inside, other=0)
    is_mine = mine[:, None] == expert[None, :]
    place = tl.sum(tl.where(is_mine, starts[None, :], 0), axis=1) + rank
    tl.store(order_ptr + place, index + 1, inside)


def sort_by_expert(
    ids: torch.Tensor, num_experts: int, rows: int, first_expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Assignments of each expert; assignment + 1 by expert, each expert's padded to blocks of so
    many rows. As many blocks as there may be, whoever takes what. Only of the `num_experts` from
    `first_expert` on."""
    num_assignments = ids.numel()
    num_blocks = num_assignments // rows + min(num_experts, num_assignments)
    zeros = torch.zeros(num_experts + num_blocks * rows, dtype=torch.int32, device=ids.device)
    counts, order = zeros[:num_experts], zeros[num_experts:]
    ranks = torch.empty(num_assignments, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(num_assignments, PLACED),)
    _count_kernel[grid](
        ids, counts, ranks, num_assignments, first_expert, NUM_EXPERTS=num_experts, BLOCK=PLACED,
    )  # fmt: skip
    _place_kernel[grid](
        ids, counts, ranks, order, num_assignments, first_expert, NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts), ROWS=rows, BLOCK=PLACED,
    )  # fmt: skip
    return counts, order
