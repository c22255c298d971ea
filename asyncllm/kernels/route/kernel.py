"""A router's logits to experts and gates in one Triton kernel, a token to a program.

In plain torch that is five kernels and more, each of which takes longer to launch than to run. The
reference is models/layers/torch_ops.py's. Of equal scores the lower expert is taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncllm.kernels.programmatic_launch import launch_flags, start_next, wait_previous
from asyncllm.kernels.records import Routed, Routing
from asyncllm.types import PADDING_SLOT

LEAST = tl.constexpr(torch.finfo(torch.float32).min)
PADDING = tl.constexpr(PADDING_SLOT)
SCORES = {"softmax": 0, "sigmoid": 1, "top_softmax": 2}


@triton.jit
def _route_kernel(
    logits_ptr, correction_ptr, slots_ptr, ids_ptr, gates_ptr, scale, least_sum,
    NUM_EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr, SCORE: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    inside = expert < NUM_EXPERTS
    correction = tl.zeros((PADDED,), dtype=tl.float32)
    if HAS_CORRECTION:
        correction = tl.load(correction_ptr + expert, inside, other=0.0)
    if PDL:
        start_next()
        after = wait_previous()
        logits_ptr += after
        if HAS_SLOTS:
            slots_ptr += after
        ids_ptr += after
        gates_ptr += after
    logit_ptr = logits_ptr + token * NUM_EXPERTS + expert
    logits = tl.load(logit_ptr, inside, other=float("-inf")).to(tl.float32)
    greatest = tl.max(logits, axis=0)
    if SCORE == 1:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - greatest)
        if SCORE == 0:
            scores = scores / tl.sum(scores, axis=0)
    # exp(logit - greatest) may be 0 of many, whose logits still differ.
    choice = logits if SCORE == 2 else scores + correction
    # As in torch, NaN is the greatest: its gate is NaN, too. Any expert is above the padding and
    # above those that are taken, which comparisons with NaN would not tell.
    choice = tl.where(choice == choice, tl.maximum(choice, LEAST), float("inf"))
    choice = tl.where(inside, choice, float("-inf"))
    place = tl.arange(0, TOP_K_PADDED)
    ids = tl.zeros((TOP_K_PADDED,), dtype=tl.int32)
    gates = tl.zeros((TOP_K_PADDED,), dtype=tl.float32)
    for taken in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        gate = tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
        ids = tl.where(place == taken, best, ids)
        gates = tl.where(place == taken, gate, gates)
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALISE:
        gates = gates / (tl.sum(gates, axis=0) + least_sum)
    if HAS_SLOTS:
        ids = tl.where(tl.load(slots_ptr + token) == PADDING, NUM_EXPERTS, ids)
    target = token * TOP_K + place
    tl.store(ids_ptr + target, ids, place < TOP_K)
    tl.store(gates_ptr + target, gates * scale, place < TOP_K)


def takes(routing: Routing) -> bool:
    return routing.num_groups == 1


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    routing: Routing,
    slots: torch.Tensor | None = None,
) -> Routed:
    """`Ops.route`, of experts in one group. Ids are int32."""
    num_tokens, num_experts = logits.shape
    assert slots is None or len(slots) == num_tokens
    ids = logits.new_empty((num_tokens, routing.top_k), dtype=torch.int32)
    gates = logits.new_empty((num_tokens, routing.top_k), dtype=torch.float32)
    _route_kernel[(num_tokens,)](
        logits, correction, slots, ids, gates, routing.scale, routing.least_sum,
        NUM_EXPERTS=num_experts, PADDED=triton.next_power_of_2(num_experts),
        TOP_K=routing.top_k, TOP_K_PADDED=triton.next_power_of_2(routing.top_k),
        SCORE=SCORES[routing.score],
        RENORMALISE=routing.renormalise or routing.score == "top_softmax",
        HAS_CORRECTION=correction is not None, HAS_SLOTS=slots is not None, num_warps=1,
        **launch_flags(logits.device),
    )  # fmt: skip
    return Routed(ids, gates)
