"""Replacements of modules of transformers models by our kernels, with the modules' weights.

Siblings, linear layers of the same input (q, k and v; gate and up), are merged into one tensor.
Their modules keep views of it, so loading does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncllm.attention.base import AttentionLayer, Rotation
from asyncllm.models.layers.ops import Norm, Normed, Ops
from asyncllm.models.transformers_attention import Step
from asyncllm.models.transformers_rope import StepRotary

FUSED = "asyncllm_fused"  # the attribute of a module with its replacement


class Siblings:
    """Linear layers of the same input, as one GEMM."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.weight = torch.empty(0)
        self.bias: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> None:
        self.weight = self._stacked("weight", device)
        self.bias = None if self.linears[0].bias is None else self._stacked("bias", device)

    def _stacked(self, name: str, device: torch.device) -> torch.Tensor:
        parts = [getattr(linear, name) for linear in self.linears]
        size = (sum(map(len, parts)), *parts[0].shape[1:])
        whole = torch.empty(size, dtype=parts[0].dtype, device=device)
        for linear, view in zip(self.linears, whole.split([*map(len, parts)]), strict=True):
            setattr(linear, name, nn.Parameter(view, requires_grad=False))
        return whole


@dataclass(frozen=True, slots=True)
class Product:
    linear: Any
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _product(self.ops, x, self.linear.weight, self.linear.bias)


class SiblingProducts:
    """Siblings in modules that are not replaced: the first call computes all of them."""

    def __init__(self, siblings: Siblings, ops: Ops) -> None:
        self._siblings, self._ops = siblings, ops
        self._x: torch.Tensor | None = None
        self._outs: dict[int, torch.Tensor] = {}  # outputs that are not used yet

    def __call__(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if self._x is not x or place not in self._outs:
            siblings, self._x = self._siblings, x
            merged = _product(self._ops, x, siblings.weight, siblings.bias)
            sizes = [linear.out_features for linear in siblings.linears]
            self._outs = dict(enumerate(merged.split(sizes, dim=-1)))
        out = self._outs.pop(place)
        if not self._outs:
            self._x = None
        return out


class ByNorm:
    """x / rms(x) * (offset + weight)."""

    def __init__(self, module: Any, offset: float, ops: Ops) -> None:
        self._module, self.offset, self._ops = module, offset, ops
        self.norm = Norm(torch.empty(0), eps_of(module))

    def bind(self) -> None:
        """Use the module's weight. Called when it is allocated, and again when it is loaded."""
        weight = self._module.weight.detach()
        if self.offset and len(self.norm.weight) == len(weight):  # graphs have its address
            self.norm.weight.copy_(weight.float() + self.offset)
        else:
            self.norm = Norm(weight.float() + self.offset if self.offset else weight, self.norm.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(_rows(x), self.norm).view(x.shape)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    module: Any
    siblings: Siblings
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.gated(Normed(_rows(x)))
        out: torch.Tensor = self.module.down_proj(gated.view(*x.shape[:-1], -1))
        return out

    def gated(self, rows: Normed) -> torch.Tensor:
        weight, bias = self.siblings.weight, self.siblings.bias
        gated = self.ops.product_swiglu(rows, weight, bias)
        return self.ops.swiglu(self.ops.product(rows, weight, bias)) if gated is None else gated


@dataclass(frozen=True, slots=True)
class ProjectedAttention:
    """Attention with a merged projection, as in native layers."""

    siblings: Siblings
    out_proj: nn.Module
    step: Step
    layer: AttentionLayer
    rotary: StepRotary | None  # None: no rotation
    ops: Ops

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.out_proj(self.attend(Normed(hidden[0].contiguous())))[None], None

    def attend(self, rows: Normed) -> torch.Tensor:
        qkv = self.ops.product(rows, self.siblings.weight, self.siblings.bias)
        assert self.step.mixer is not None
        heads = qkv.unflatten(-1, (-1, self.layer.head_dim))
        return self.step.mixer.attend(self.layer, heads, self.step.rotations[self.rotary])


def _product(
    ops: Ops, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return ops.product(Normed(_rows(x)), weight, bias).view(*x.shape[:-1], -1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] as [rows, size], contiguous: heads that lie between others are still a view of
    them after `reshape`, if there is one token."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Replaced(nn.Module):
    """Runs the replacement on its first argument."""

    def forward(self, *args: Any, **named: Any) -> Any:
        return getattr(self, FUSED)(args[0] if args else named["hidden_states"])


def replace_module(module: nn.Module, by: Callable[..., Any]) -> None:
    """Replace a module by `by`, with a subclass for this module: setting its `forward` would form
    a reference cycle."""
    setattr(module, FUSED, by)
    module.__class__ = type(type(module).__name__, (_Replaced, type(module)), {})


def no_rotation(positions: torch.Tensor, dim: int) -> Rotation:
    """A rotation by zero."""
    half = torch.ones(1, dim // 2, device=positions.device)
    return Rotation(torch.zeros_like(positions), torch.cat((half, 0 * half), dim=1))


def eps_of(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
