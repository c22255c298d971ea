"""A feed-forward of experts: a router takes a few of them for each token, and sums what they give.

Routing is a handful of operations on [T, experts] numbers, whose shapes depend on T alone; what
follows is the method's (experts_method.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import torch
import torch.nn.functional as F

from asyncllm.models.base import Load
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.experts_method import ExpertsShape
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.models.layers.lora_experts import LoRAExperts
from asyncllm.models.layers.mlp import MLP
from asyncllm.models.layers.ops import AddRMSNorm, ExpertRange, Normed, Routed, Routing
from asyncllm.models.parallel.mesh import Mesh

FULL_READ = 4.0


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
        self.top_k = routing.top_k
        self._ops = build.ops
        self._in_float32 = in_float32
        self._correction_name = correction
        dtype = torch.float32 if in_float32 else build.dtype
        experts, device = shape.num_experts, build.device
        self._weight = torch.empty(experts, shape.hidden_size, dtype=dtype, device=device)
        self._bias = torch.empty(experts, dtype=dtype, device=device) if bias else None
        self._correction = None
        if correction is not None:
            self._correction = torch.empty(experts, dtype=torch.float32, device=device)
        self._lora = None
        if build.lora is not None:
            self._lora = build.lora.layer(LinearShape({name: experts}, shape.hidden_size, bias))
            self._lora.base = {"weight": self._weight}
            if self._bias is not None:
                self._lora.base = {**self._lora.base, "bias": self._bias}

    def __call__(self, x: Normed, slots: torch.Tensor | None = None) -> Routed:
        """slots: as for `Ops.route`."""
        delta = None if self._lora is None else self._lora.delta(x.values)
        logits = self._product(x)
        if delta is not None:
            logits = delta.add(logits)
        return self._ops.route(logits, self._correction, self._routing, slots)

    def _product(self, x: Normed) -> torch.Tensor:
        if self._in_float32:
            return F.linear(x.whole().float(), self._weight, self._bias)
        return self._ops.product(x, self._weight, self._bias)

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
        mesh = build.mesh.config
        self._own = shape.own(mesh, build.dtype)
        self._range = None
        if mesh.by_expert:
            self._range = ExpertRange(shape.share(mesh).experts.start, shape.num_experts)
        self._router = router
        self._shared = shared
        self._shared_gate = shared_gate
        self._method = build.experts_method(name, shape)
        self.weights = self._method.create_weights(shape)
        self._ops = build.ops
        self._summing = build.mesh if mesh.tp > 1 else None
        self._engines = build.mesh if mesh.dp > 1 else None
        self._lora = None
        if build.lora is not None:
            lora = LoRAExperts(build.lora, name, shape, mesh)
            self._lora = build.lora.of_experts.register(lora)

    def add(self, x: Normed, end: AddRMSNorm) -> Normed:
        """As `MLP.add`."""
        lora = self._lora if self._lora is not None and self._lora.is_used else None
        slots = None if self._engines is None else self._engines.row_slots
        routed, rows = self._router(x, slots), x
        if self._engines is not None:
            rows, routed = self._of_all_engines(self._engines, x, routed)
        if self._range is not None:
            routed = replace(routed, own=self._range)
        out = self._method.apply(self._own, self.weights, rows, routed, lora)
        if self._engines is not None:
            out = self._engines.sum_rows(out)
        if self._shared is not None:
            shared = self._shared.down_proj(self._shared.gated(x))
            if self._shared_gate is not None:
                shared = shared.mul_(self._shared_gate(x).sigmoid())
            out = out.add_(shared)
        if self._summing is None:
            return end.apply(self._ops, out)
        return end.apply_to_sum(self._ops, self._summing, out)

    def _of_all_engines(self, mesh: Mesh, x: Normed, routed: Routed) -> tuple[Normed, Routed]:
        """Their rows below each other: for each of them every rank has some of the experts."""
        slots = [] if self._lora is None else self._lora.slots_among_engines
        squares = [] if x.squares is None else [x.squares]
        every = mesh.gather_rows(x.values, routed.ids, routed.gates, *squares, *slots)
        values, ids, gates = every[:3]
        if self._lora is not None:
            self._lora.select(every[3 + len(squares) :])
        return Normed(values, every[3] if squares else None, x.eps), Routed(ids, gates)

    @property
    def full_read_tokens(self) -> int:
        """So many different tokens take nearly all experts: each is missed by e ** -FULL_READ."""
        return ceil(FULL_READ * self._shape.num_experts / self._router.top_k)

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
        self._method.finish(self._own, self.weights)
        for linear in self.linears:
            linear.finish_loading()
