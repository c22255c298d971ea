"""Decoder layers of transformers models, with additions and norms fused.

    hidden += attention(norm(hidden))        the addition and the next norm are one kernel, with one
    hidden += feed_forward(norm(hidden))     row also the GEMM before them

This applies to layers whose code does just that, which is proved on a copy with other sublayers,
and whose norms, attention and feed-forward are replaced. A layer still returns hidden states. The
same kernel computes the next layer's norm, which is kept until that layer gets the same tensor.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncllm.models.layers.ops import AddRMSNorm, Normed, Ops
from asyncllm.models.transformers_modules import (
    FUSED,
    ByNorm,
    GatedMLP,
    ProjectedAttention,
    replace_module,
)
from asyncllm.models.transformers_proofs import equal, holds, random_inputs, random_twin
from asyncllm.models.transformers_shards import ON_RANK

FIRST, ATTENTION, SECOND, FEED_FORWARD = (
    "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
)  # fmt: skip


@dataclass(slots=True)
class Kept:
    """The norm of hidden states, computed by the layer before."""

    hidden: torch.Tensor | None = None
    normed: Normed | None = None

    def take(self, hidden: torch.Tensor) -> Normed | None:
        normed = self.normed if self.hidden is hidden else None
        self.hidden = self.normed = None
        return normed


@dataclass(frozen=True, slots=True)
class FusedLayer:
    first: ByNorm
    attention: ProjectedAttention
    second: ByNorm
    feed_forward: GatedMLP
    next_norm: ByNorm | None  # of the next such layer
    kept: Kept
    ops: Ops

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.kept.take(hidden)
        residual = hidden[0]
        if x is None:  # others may use this tensor
            residual = residual.clone()
            x = Normed(self.ops.rms_norm(residual, self.first.norm))
        seen = Normed(self.attention.attend(x))
        end = AddRMSNorm(residual, self.second.norm)
        x = self._added(seen, self.attention.out_proj, end)
        gated = Normed(self.feed_forward.gated(x))
        end = AddRMSNorm(residual, None if self.next_norm is None else self.next_norm.norm)
        x = self._added(gated, self.feed_forward.module.down_proj, end)
        out = residual[None]
        if self.next_norm is not None:
            self.kept.hidden, self.kept.normed = out, x
        return out

    def _added(self, x: Normed, linear: Any, end: AddRMSNorm) -> Normed:
        if hasattr(linear, ON_RANK):  # summed over ranks
            return end.apply(self.ops, linear(x.whole()))
        weight, bias = linear.weight, linear.bias
        fused = end.fused(self.ops, x, weight, bias)
        return end.apply(self.ops, self.ops.product(x, weight, bias)) if fused is None else fused


def find_layers(
    model: nn.Module, kinds: Sequence[Collection[nn.Module]], device: torch.device
) -> list[list[Any]]:
    """Runs of consecutive layers that can be fused. kinds: replaced norms, attentions, norms and
    feed-forwards. device: of the proofs."""
    runs: list[list[Any]] = []
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        runs.append([])
        for layer in layers:
            if _has(layer, kinds) and holds(_proves, layer, device):
                runs[-1].append(layer)
            else:
                runs.append([])
    return [run for run in runs if run]


def replace_layers(runs: Sequence[Sequence[Any]], ops: Ops) -> None:
    """Replace layers, whose parts are replaced already."""
    kept = Kept()
    for run in runs:
        for layer, following in zip(run, [*run[1:], None], strict=True):
            first, attention, second, feed_forward = (getattr(p, FUSED) for p in _parts(layer))
            then = None if following is None else getattr(_parts(following)[0], FUSED)
            ours = FusedLayer(first, attention, second, feed_forward, then, kept, ops)
            replace_module(layer, ours)


def _parts(layer: Any) -> list[Any]:
    return [layer._modules.get(name) for name in (FIRST, ATTENTION, SECOND, FEED_FORWARD)]


def _has(layer: Any, kinds: Sequence[Collection[nn.Module]]) -> bool:
    """Whether a layer has these parts, and nothing else with parameters."""
    with_any = {child for child in layer.children() if any(True for _ in child.parameters())}
    parts = _parts(layer)
    is_of = all(part in kind for part, kind in zip(parts, kinds, strict=True))
    return is_of and with_any == {*parts} and not layer._parameters


class _Sublayer(nn.Module):
    """An arbitrary function, for both sides of a proof."""

    def __init__(self, factor: float, is_attention: bool) -> None:
        super().__init__()
        self.factor, self.is_attention = factor, is_attention

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        out = (hidden_states * self.factor).sin()
        return (out, None) if self.is_attention else out


def _proves(layer: Any, device: torch.device) -> bool:
    attention, feed_forward = _Sublayer(1.3, True), _Sublayer(0.7, False)
    shell = copy.copy(layer)
    shell._modules = layer._modules | {ATTENTION: attention, FEED_FORWARD: feed_forward}
    twin = random_twin(shell, device)
    x = random_inputs(len(getattr(layer, FIRST).weight), device)
    parameters = inspect.signature(layer.forward).parameters.values()
    others = {p.name: None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    others.pop("hidden_states")
    theirs = twin(x.clone(), **others)
    first, second = getattr(twin, FIRST), getattr(twin, SECOND)
    middle = x + attention(first(x))[0]
    ours = middle + feed_forward(second(middle))
    return isinstance(theirs, torch.Tensor) and equal(ours, theirs)
