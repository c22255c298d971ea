"""A feed-forward of experts: a router takes a few of them for each token, and sums what they give.

Routing is a handful of operations on [T, experts] numbers, whose shapes depend on T alone; what
follows is the method's (experts_method.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import MLP
from asyncllm.models.layers.ops import AddRMSNorm, Normed, Routed


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become experts and their gates.

    score: of each expert, from its logit; "top_softmax" is the softmax over those taken alone.
    renormalise: the gates' sum is 1, before `scale` multiplies them.
    Of `num_groups` groups of experts only the best `top_groups` count: by the sum of their two best
    scores, or the best one where `group_score` is "max". What is left out counts `excluded`.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["two", "max"] = "two"
    excluded: float = -torch.inf
    least_sum: float = 0.0  # added to the sum that renormalises


def route(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> Routed:
    """logits [T, experts]; correction: float32 [experts], added where experts are chosen, not to
    their gates."""
    logits = logits.float()
    if routing.score == "top_softmax":
        best, ids = logits.topk(routing.top_k, dim=-1)
        return Routed(ids, best.softmax(-1))
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), routing.excluded)
    ids = choice.topk(routing.top_k, dim=-1).indices
    gates = scores.gather(1, ids)
    if routing.renormalise:
        gates = gates / (gates.sum(-1, keepdim=True) + routing.least_sum)
    return Routed(ids, gates if routing.scale == 1.0 else gates * routing.scale)


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, experts] -> bool of the same shape."""
    groups = choice.unflatten(1, (routing.num_groups, -1))
    num_best = 2 if routing.group_score == "two" else 1
    best = groups.topk(num_best, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return kept.unsqueeze(-1).expand_as(groups).flatten(1)


class Router:
    """`in_float32`: weight and product, as where scores are sigmoids. `correction`: the name of the
    tensor that is added where experts are chosen."""

    def __init__(
        self,
        name: str,
        shape: ExpertsShape,
        routing: Routing,
        build: Build,
        *,
        bias: bool = False,
        in_float32: bool = False,
        correction: str | None = None,
    ) -> None:
        self._name = name
        self._routing = routing
        self._ops = build.ops
        self._in_float32 = in_float32
        self._correction_name = correction
        dtype = torch.float32 if in_float32 else build.dtype
        sizes: tuple[tuple[int, ...], ...] = (
            (shape.num_experts, shape.hidden_size),
            (shape.num_experts,),
        )
        self._weight = torch.empty(sizes[0], dtype=dtype, device=build.device)
        self._bias = torch.empty(sizes[1], dtype=dtype, device=build.device) if bias else None
        self._correction = None
        if correction is not None:
            self._correction = torch.empty(sizes[1], dtype=torch.float32, device=build.device)

    def __call__(self, x: Normed) -> Routed:
        if self._in_float32:
            logits = F.linear(x.whole().float(), self._weight, self._bias)
        else:
            logits = self._ops.product(x, self._weight, self._bias)
        return route(logits, self._correction, self._routing)

    def loads(self) -> Iterator[Load]:
        yield Load(f"{self._name}.weight", self._weight)
        if self._bias is not None:
            yield Load(f"{self._name}.bias", self._bias)
        if self._correction is not None:
            yield Load(f"{self._name}.{self._correction_name}", self._correction)


class Experts:
    """Experts with their router, and beside them what every token passes through: `shared`, which
    `shared_gate` scales by the sigmoid of a number for each token."""

    def __init__(
        self,
        name: str,
        shape: ExpertsShape,
        router: Router,
        build: Build,
        shared: MLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self._name = name
        self._shape = shape
        self._router = router
        self._shared = shared
        self._shared_gate = shared_gate
        self._method = build.experts_method
        self.weights = self._method.create_weights(shape)
        self._ops = build.ops

    def add(self, x: Normed, end: AddRMSNorm) -> Normed:
        """As `MLP.add`."""
        out = self._method.apply(self._shape, self.weights, x, self._router(x))
        if self._shared is not None:
            shared = self._shared.down_proj(self._shared.gated(x))
            if self._shared_gate is not None:
                shared = shared.mul_(self._shared_gate(x).sigmoid())
            out = out.add_(shared)
        return end.apply(self._ops, out)

    @property
    def linears(self) -> tuple[Linear, ...]:
        gates = () if self._shared_gate is None else (self._shared_gate,)
        return gates if self._shared is None else (*gates, *self._shared.linears)

    def loads(self) -> Iterator[Load]:
        yield from self._router.loads()
        yield from self._method.loads(self._name, self._shape, self.weights)
        for linear in self.linears:
            yield from linear.loads()

    def finish_loading(self) -> None:
        self._method.finish(self.weights)
        for linear in self.linears:
            linear.finish_loading()
