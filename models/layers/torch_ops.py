"""`Ops` in torch: for CPUs, and as the reference for kernels.

It rounds as transformers' models do: in bfloat16 and float16 a norm is computed in float32 and
rounded before the multiplication by its weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from asyncllm.attention.heads import inverse_rms, rms_norm
from asyncllm.kernels.all_reduce import RowSums
from asyncllm.models.layers.ops import (
    SILU,
    Activation,
    ExpertAdapters,
    ExpertWeights,
    Norm,
    Normed,
    Ops,
    Routed,
    Routing,
)
from asyncllm.types import PADDING_SLOT


class TorchOps(Ops):
    """Stateless and unfused. It works in place where possible: on a CPU a large new tensor costs
    more than its arithmetic. It asserts that rows are contiguous, for the kernels' sake."""

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        assert x.is_contiguous()
        return rms_norm(x, norm.weight, norm.eps, norm.centered)

    def swiglu(self, x: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
        assert x.is_contiguous()
        return swiglu(x, activation)

    def route(
        self,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        routing: Routing,
        slots: torch.Tensor | None = None,
    ) -> Routed:
        return route(logits, correction, routing, slots)

    def experts(
        self,
        x: Normed,
        weights: ExpertWeights,
        routed: Routed,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        assert x.values.is_contiguous()
        return grouped_experts(x.values, weights, routed, adapters)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        sums: RowSums | None = None,
    ) -> Normed:
        assert sums is None, "a mesh has them only where there are CUDA kernels"
        assert x.is_contiguous() and residual.is_contiguous()
        if norm.centered or norm.weight.dtype != x.dtype:
            return Normed(self.rms_norm(residual.add_(x), norm))
        residual32 = residual.add_(x).float()
        torch.mul(residual32, inverse_rms(residual32, norm.eps), out=x)
        return Normed(x.mul_(norm.weight))

    def product(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert x.squares is None, "only a fused kernel leaves a factor to its successor"
        assert x.values.is_contiguous()
        return F.linear(x.values, weight, bias)


def swiglu(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`Ops.swiglu`."""
    gate, up = x.chunk(2, dim=-1)
    if activation.name == "silu":
        return F.silu(gate).mul_(up)
    if activation.name == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * torch.sigmoid(activation.alpha * gate)).mul_(up + 1)


def grouped_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    routed: Routed,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """`Ops.experts` by two grouped GEMMs over sorted rows: [T, hidden_size] -> the same shape, a
    new tensor.

    The ends of experts' rows are known on the device only, so this can be captured.
    """

    def compute(
        rows: torch.Tensor, ends: torch.Tensor, expert_ids: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        def product(
            rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
            return out if bias is None else out.add_(bias[expert_ids])

        gate_up = product(rows, weights.gate_up, weights.gate_up_bias)
        if adapters is not None:
            slots = adapters.row_slots(tokens)
            gate_up = adapters.add_gate_up(gate_up, rows, slots, ends)
        gated = swiglu(gate_up, weights.activation)
        out = product(gated, weights.down, weights.down_bias)
        return out if adapters is None else adapters.add_down(out, gated, slots, ends)

    return by_expert(x, routed, len(weights.gate_up), compute)


def by_expert(
    x: torch.Tensor,
    routed: Routed,
    num_experts: int,
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum of each token's experts, weighted by gates: [T, hidden_size] -> the same shape.

    compute: takes rows sorted by expert [T * k, hidden_size], the end of each expert's rows, int32
    [experts], and each row's expert and token.
    """
    top_k, ids = routed.ids.shape[1], routed.ids
    if routed.own is not None:  # others come last, behind the last expert's end
        ids = ids - routed.first_expert
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    expert_ids, order = ids.flatten().sort()  # [T * k]
    every = torch.arange(num_experts, dtype=expert_ids.dtype, device=x.device)
    ends = torch.searchsorted(expert_ids, every, right=True, out_int32=True)
    tokens = order.div(top_k, rounding_mode="floor")
    out = compute(x[tokens], ends, expert_ids.clamp(max=num_experts - 1), tokens)
    if routed.own is not None:
        out = out.masked_fill((expert_ids == num_experts).unsqueeze(1), 0)
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    gates = routed.gates.unsqueeze(1)  # [T, 1, k]
    return (gates @ unsorted.view(len(x), top_k, -1).float()).squeeze(1).to(x.dtype)


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    routing: Routing,
    slots: torch.Tensor | None = None,
) -> Routed:
    """`Ops.route`."""
    routed = _route(logits.float(), correction, routing)
    if slots is None:
        return routed
    padding = (slots == PADDING_SLOT).unsqueeze(1)
    return Routed(routed.ids.masked_fill(padding, logits.shape[1]), routed.gates)


def _route(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> Routed:
    if routing.score == "top_softmax":
        best, ids = logits.topk(routing.top_k, dim=-1)
        return Routed(ids, best.softmax(-1))
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), -torch.inf)
    ids = choice.topk(routing.top_k, dim=-1).indices
    gates = scores.gather(1, ids)
    if routing.renormalise:
        gates = gates / (gates.sum(-1, keepdim=True) + routing.least_sum)
    return Routed(ids, gates if routing.scale == 1.0 else gates * routing.scale)


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Which experts are in the best groups: bool [T, experts]."""
    groups = choice.unflatten(1, (routing.num_groups, -1))
    num_best = 2 if routing.group_score == "two" else 1
    best = groups.topk(num_best, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return kept.unsqueeze(-1).expand_as(groups).flatten(1)
