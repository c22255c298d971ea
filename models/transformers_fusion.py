"""Finds modules of transformers models that our kernels replace, each after a proof of equality.

Candidates are found by the names of their children. A module's result depends on its weights, its
attributes and its `layer_idx`. So attention is proved for each layer, and modules without
`layer_idx` once per kind.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncllm.attention.base import HeadNorm
from asyncllm.models.layers.ops import Ops
from asyncllm.models.transformers_attention import LAYER, AttentionCall, Step
from asyncllm.models.transformers_layers import find_layers, replace_layers
from asyncllm.models.transformers_modules import (
    FUSED,
    ByNorm,
    GatedMLP,
    Product,
    ProjectedAttention,
    SiblingProducts,
    Siblings,
    eps_of,
    replace_module,
)
from asyncllm.models.transformers_proofs import (
    AttentionPlan,
    holds,
    proves_attention,
    proves_mlp,
    proves_norm,
)
from asyncllm.models.transformers_rope import StepRotary
from asyncllm.models.transformers_shards import ON_RANK

QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GATE_UP_NAMES = (("gate_proj", "up_proj"), ("gate_up_proj",))
OUT_NAMES = ("o_proj", "out_proj", "dense")


class Fusion:
    """The modules to replace. It is made before parameters are allocated."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """device: of the proofs."""
        self._model, self._dtype, self._device = model, dtype, device
        self._proved: dict[Hashable, bool] = {}
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._tied = {each for each, count in uses.items() if count > 1}
        self.norms = [(module, offset) for module in model.modules()
                      if (offset := self._norm_offset(module)) is not None]  # fmt: skip
        self.attentions: list[AttentionPlan] = []
        self.mlps: list[tuple[Any, Siblings]] = []
        for module in model.modules():
            siblings = self._siblings(module, GATE_UP_NAMES)
            if siblings is not None and self._once(module, proves_mlp, siblings):
                self.mlps.append((module, Siblings(siblings)))

    def add_attention(
        self, call: AttentionCall, named: dict[str, Any], rotaries: Sequence[StepRotary | None]
    ) -> None:
        """named: keyword arguments of the module in the trial. rotaries: candidates."""
        linears = self._siblings(call.module, QKV_NAMES)
        out = next((getattr(call.module, n) for n in OUT_NAMES if hasattr(call.module, n)), None)
        if linears is None or not isinstance(out, nn.Linear) or call.head_dim != call.v_dim:
            return
        norms = getattr(call.module, "q_norm", None), getattr(call.module, "k_norm", None)
        offsets = {id(module): offset for module, offset in self.norms}
        if norms != (None, None) and any(offsets.get(id(norm)) != 0 for norm in norms):
            return  # not proved, or of 1 + weight, which the kernels do not support
        plan = AttentionPlan(call, Siblings(linears), out, None, None)
        if norms != (None, None):
            plan.norms = norms
        for plan.rotary in rotaries:
            if holds(proves_attention, plan, linears, named, self._device):
                self.attentions.append(plan)
                return

    def allocate(self, device: torch.device) -> None:
        """Allocate merged weights."""
        self._merged = self._others()
        norms, mlps = [{module for module, _ in found} for found in (self.norms, self.mlps)]
        attentions = {plan.call.module for plan in self.attentions}
        kinds = norms, attentions, norms, mlps
        self.layers = find_layers(self._model, kinds, self._device)
        for siblings in [
            *(plan.siblings for plan in self.attentions),
            *(siblings for _, siblings in self.mlps),
            *self._merged,
        ]:
            siblings.allocate(device)

    def apply(self, step: Step, ops: Ops) -> None:
        """Replace the modules. Parameters are allocated."""
        self.by_norm = [ByNorm(module, offset, ops) for module, offset in self.norms]
        for (module, _), norm in zip(self.norms, self.by_norm, strict=True):
            norm.bind()
            replace_module(module, norm)
        for siblings in self._merged:
            products = SiblingProducts(siblings, ops)
            for place, linear in enumerate(siblings.linears):
                replace_module(linear, partial(products, place))
        for module, siblings in self.mlps:
            replace_module(module, GatedMLP(module, siblings, ops))
        for plan in self.attentions:
            (layer,) = getattr(plan.call.module, LAYER)
            fused = ProjectedAttention(plan.siblings, plan.out_proj, step, layer, plan.rotary, ops)
            replace_module(plan.call.module, fused)
        replace_layers(self.layers, ops)
        for module in [m for m in self._model.modules() if isinstance(m, nn.Linear)]:
            if module.weight.dtype != self._dtype:
                continue
            if type(module) is nn.Linear:
                replace_module(module, Product(module, ops))
            elif hasattr(module, ON_RANK):
                setattr(module, FUSED, Product(module, ops))

    def head_norm(self, call: AttentionCall) -> HeadNorm | None:
        for plan in self.attentions:
            if plan.call is call and plan.norms is not None:
                q, k = plan.norms
                return HeadNorm(q.weight.detach(), k.weight.detach(), eps_of(q))
        return None

    def finish_loading(self) -> None:
        for norm in self.by_norm:
            norm.bind()

    def _siblings(
        self, module: Any, names: Sequence[tuple[str, ...]]
    ) -> Sequence[nn.Linear] | None:
        """The module's children with the first of these sets of names, if they can be merged."""
        for each in names:
            found = [module._modules.get(name) for name in each]
            if all(type(child) is nn.Linear for child in found):
                kinds = {(c.in_features, c.bias is None, c.weight.dtype) for c in found if c}
                # Weights shared with other modules cannot be merged.
                is_tied = not self._tied.isdisjoint(id(c.weight) for c in found if c)
                if len(kinds) == 1 and not is_tied and found[0].weight.dtype == self._dtype:
                    return found
        return None

    def _others(self) -> list[Siblings]:
        """Linear layers of the same input in modules that are not replaced."""
        ours = {id(plan.call.module) for plan in self.attentions}
        ours |= {id(module) for module, _ in self.mlps}
        found = []
        for module in self._model.modules():
            for names in (QKV_NAMES[:1], GATE_UP_NAMES[:1]):
                siblings = None if id(module) in ours else self._siblings(module, names)
                if siblings is not None:
                    found.append(Siblings(siblings))
        return found

    def _norm_offset(self, module: Any) -> float | None:
        """The offset of an RMSNorm, x / rms(x) * (offset + weight); None for other modules."""
        if [name for name, _ in module.named_parameters()] != ["weight"]:
            return None
        if module._buffers or module._modules or module.weight.dim() != 1 or eps_of(module) is None:
            return None
        if module.weight.dtype != self._dtype:
            return None
        if len(inspect.signature(module.forward).parameters) > 1:  # such as a gate
            return None
        found = (o for o in (0.0, 1.0) if self._once(module, proves_norm, o))
        return next(found, None)

    def _once(self, module: Any, proves: Callable[..., bool], *arguments: Any) -> bool:
        """Prove a module, or use the result of another module of the same kind."""
        hashable = [each for each in arguments if isinstance(each, float)]
        key = (*_kind(module), proves, *hashable)
        if hasattr(module, "layer_idx") or key not in self._proved:
            self._proved[key] = holds(proves, module, *arguments, self._device)
        return self._proved[key]


def _kind(module: nn.Module) -> Iterator[Hashable]:
    for name, child in module.named_modules():
        yield name, type(child).__module__, type(child).__qualname__
        for attribute, value in sorted(vars(child).items()):
            if isinstance(value, str | int | float | None):
                yield attribute, value
        yield from ((n, p.shape, p.dtype) for n, p in child.named_parameters(recurse=False))
