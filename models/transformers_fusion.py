"""Modules of transformers' models that our kernels do instead, each after a proof.

A module is a candidate by the names of its children. Then a twin of it gets random weights in
float32, and its own code and ours the same inputs: only where both give the same, ours runs. What a
module depends on besides its weights and attributes is its place in the model (`layer_idx`), so
attention is proved layer by layer, and what has none once per kind.

Merged siblings (q, k and v; gate and up) lie one below the other in one tensor. Their modules keep
views of it, so that loading knows nothing of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
from asyncllm.attention.heads import rotated_heads
from asyncllm.models.layers.ops import Norm, Normed, Ops
from asyncllm.models.transformers_attention import LAYER, AttentionCall, Step
from asyncllm.models.transformers_rope import HANDLER, StepRotary

FUSED = "asyncllm_fused"  # the attribute of a module that runs by ours
QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GATE_UP_NAMES = (("gate_proj", "up_proj"), ("gate_up_proj",))
OUT_NAMES = ("o_proj", "out_proj", "dense")
PROOF_TOKENS = 5
TOLERANCE = 1e-4  # relative, in float32


class Siblings:
    """Linear layers of one input, as one product."""

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
    """Siblings in code that is not ours: whichever is called first computes them all."""

    def __init__(self, siblings: Siblings, ops: Ops) -> None:
        self._siblings, self._ops = siblings, ops
        self._x: torch.Tensor | None = None
        self._outs: dict[int, torch.Tensor] = {}  # those not yet asked for

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
        self.norm = Norm(torch.empty(0), _eps(module))

    def bind(self) -> None:
        """To the weights: once they are allocated, again when they are loaded."""
        weight = self._module.weight.detach()
        if self.offset and len(self.norm.weight) == len(weight):  # graphs hold its address
            self.norm.weight.copy_(weight.float() + self.offset)
        else:
            self.norm = Norm(weight.float() + self.offset if self.offset else weight, self.norm.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]), self.norm).view(x.shape)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    module: Any
    siblings: Siblings
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = Normed(x.reshape(-1, x.shape[-1]))
        weight, bias = self.siblings.weight, self.siblings.bias
        gated = self.ops.product_swiglu(rows, weight, bias)
        if gated is None:
            gated = self.ops.swiglu(self.ops.product(rows, weight, bias))
        out: torch.Tensor = self.module.down_proj(gated.view(*x.shape[:-1], -1))
        return out


@dataclass(frozen=True, slots=True)
class ProjectedAttention:
    """Attention from the projection on, as a native layer has it."""

    siblings: Siblings
    out_proj: nn.Module
    step: Step
    layer: AttentionLayer
    rotary: StepRotary | None  # None: no rotation
    ops: Ops

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        qkv = _product(self.ops, hidden[0], self.siblings.weight, self.siblings.bias)
        assert self.step.mixer is not None
        heads = qkv.unflatten(-1, (-1, self.layer.head_dim))
        out = self.step.mixer.attend(self.layer, heads, self.step.rotations[self.rotary])
        return self.out_proj(out)[None], None


def _product(
    ops: Ops, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return ops.product(Normed(rows), weight, bias).view(*x.shape[:-1], -1)


class _Replaced(nn.Module):
    """Runs by ours, on its first argument."""

    def forward(self, *args: Any, **named: Any) -> Any:
        return getattr(self, FUSED)(args[0] if args else named["hidden_states"])


def replace_module(module: nn.Module, by: Callable[..., Any]) -> None:
    """A subclass for the one module: a function of it would keep the module that keeps it."""
    setattr(module, FUSED, by)
    module.__class__ = type(type(module).__name__, (_Replaced, type(module)), {})


@dataclass(slots=True)
class AttentionPlan:
    """A layer whose attention is proved to be ours."""

    call: AttentionCall
    siblings: Siblings
    out_proj: nn.Module
    rotary: StepRotary | None
    norms: tuple[Any, Any] | None  # of q and of k


class Fusion:
    """What of a model is ours. Found before its parameters have memory."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """device: for the proofs."""
        self._model, self._dtype, self._device = model, dtype, device
        self._proved: dict[Hashable, bool] = {}
        self.norms = [(module, offset) for module in model.modules()
                      if (offset := self._norm_offset(module)) is not None]  # fmt: skip
        self.attentions: list[AttentionPlan] = []
        self.mlps: list[tuple[Any, Siblings]] = []
        for module in model.modules():
            siblings = self._siblings(module, GATE_UP_NAMES)
            if siblings is not None and self._once(module, _proves_mlp, siblings):
                self.mlps.append((module, Siblings(siblings)))

    def add_attention(
        self, call: AttentionCall, named: dict[str, Any], rotaries: Sequence[StepRotary | None]
    ) -> None:
        """named: the arguments that the model gave to the module; rotaries: to be tried."""
        linears = self._siblings(call.module, QKV_NAMES)
        out = next((getattr(call.module, n) for n in OUT_NAMES if hasattr(call.module, n)), None)
        if linears is None or not isinstance(out, nn.Linear) or call.head_dim != call.v_dim:
            return
        norms = getattr(call.module, "q_norm", None), getattr(call.module, "k_norm", None)
        offsets = {id(module): offset for module, offset in self.norms}
        if norms != (None, None) and any(offsets.get(id(norm)) != 0 for norm in norms):
            return  # not ours, or of 1 + weight, which kernels of heads do not add
        plan = AttentionPlan(call, Siblings(linears), out, None, None)
        if norms != (None, None):
            plan.norms = norms
        for plan.rotary in rotaries:
            if _holds(_proves_attention, plan, linears, named, self._device):
                self.attentions.append(plan)
                return

    def allocate(self, device: torch.device) -> None:
        """Memory for what is merged."""
        self._merged = self._others()
        for siblings in [
            *(plan.siblings for plan in self.attentions),
            *(siblings for _, siblings in self.mlps),
            *self._merged,
        ]:
            siblings.allocate(device)

    def apply(self, step: Step, ops: Ops) -> None:
        """To the modules, whose parameters have memory."""
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
        for module in [m for m in self._model.modules() if type(m) is nn.Linear]:
            if module.weight.dtype == self._dtype:
                replace_module(module, Product(module, ops))

    def head_norm(self, call: AttentionCall) -> HeadNorm | None:
        for plan in self.attentions:
            if plan.call is call and plan.norms is not None:
                q, k = plan.norms
                return HeadNorm(q.weight.detach(), k.weight.detach(), _eps(q))
        return None

    def finish_loading(self) -> None:
        for norm in self.by_norm:
            norm.bind()

    def _siblings(
        self, module: Any, names: Sequence[tuple[str, ...]]
    ) -> Sequence[nn.Linear] | None:
        """Children of the first of these sets of names that the module has, which can be merged."""
        for each in names:
            found = [module._modules.get(name) for name in each]
            if all(type(child) is nn.Linear for child in found):
                kinds = {(c.in_features, c.bias is None, c.weight.dtype) for c in found if c}
                shared = len({id(c.weight) for c in found if c}) == len(found)
                if len(kinds) == 1 and shared and found[0].weight.dtype == self._dtype:
                    return found
        return None

    def _others(self) -> list[Siblings]:
        """Siblings in modules whose code is not ours."""
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
        """Of an RMSNorm, which is ours: x / rms(x) * (offset + weight)."""
        if [name for name, _ in module.named_parameters()] != ["weight"]:
            return None
        if module._buffers or module._modules or module.weight.dim() != 1 or _eps(module) is None:
            return None
        if module.weight.dtype != self._dtype:
            return None
        if len(inspect.signature(module.forward).parameters) > 1:  # as a gate
            return None
        found = (o for o in (0.0, 1.0) if self._once(module, _proves_norm, o))
        return next(found, None)

    def _once(self, module: Any, proves: Callable[..., bool], *arguments: Any) -> bool:
        """Of modules that do not know their place one stands for its kind."""
        hashable = [each for each in arguments if isinstance(each, float)]
        key = (*_kind(module), proves, *hashable)
        if hasattr(module, "layer_idx") or key not in self._proved:
            self._proved[key] = _holds(proves, module, *arguments, self._device)
        return self._proved[key]


def has_projections(module: nn.Module) -> bool:
    return any(all(hasattr(module, name) for name in names) for names in QKV_NAMES)


def _kind(module: nn.Module) -> Iterator[Hashable]:
    for name, child in module.named_modules():
        yield name, type(child).__module__, type(child).__qualname__
        for attribute, value in sorted(vars(child).items()):
            if isinstance(value, str | int | float | None):
                yield attribute, value
        yield from ((n, p.shape, p.dtype) for n, p in child.named_parameters(recurse=False))


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


# --- proofs -----------------------------------------------------------------------------------


def _holds(proves: Callable[..., bool], *arguments: Any) -> bool:
    """Whatever a module's own code cannot do with such inputs proves nothing."""
    try:
        with torch.inference_mode():
            return proves(*arguments)
    except Exception:  # of no common base
        return False


def _twin(module: Any, device: torch.device) -> Any:
    """The module with random weights in float32. Its configuration is shared."""
    handler = getattr(module, HANDLER, None)
    memo = {id(each): each for each in (handler, getattr(module, "config", None))}
    for child in module.modules():
        memo |= {id(v): v for v in (getattr(child, "config", None), getattr(child, HANDLER, None))}
    twin = copy.deepcopy(module, memo).to_empty(device=device).float()
    generator = torch.Generator(device).manual_seed(0)
    # Repeated numbers: to draw as many as a large layer has would take longer than to load it.
    drawn = torch.randn(65_537, device=device, generator=generator)
    for parameter in twin.parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + 0.3 * drawn[torch.arange(len(parameter), device=device) % 65_537]
        else:
            repeats = -(-parameter.numel() // len(drawn))
            values = drawn.repeat(repeats)[: parameter.numel()].view(parameter.shape)
            parameter.data = values.mul_(parameter.shape[-1] ** -0.5)
    return twin


def _inputs(size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(1, PROOF_TOKENS, size, device=device, generator=generator)


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    difference = (ours - theirs).norm() <= TOLERANCE * theirs.norm()
    return ours.shape == theirs.shape and bool(difference)


def _proves_norm(module: Any, offset: float, device: torch.device) -> bool:
    twin = _twin(module, device)
    x = _inputs(len(twin.weight), device)
    for scale in (1.0, float(_eps(module)) ** 0.5):  # where eps counts, too
        x32 = x * scale
        ours = x32 * (x32.square().mean(-1, keepdim=True) + _eps(module)).rsqrt()
        if not _equal(ours * (twin.weight + offset), twin(x32)):
            return False
    return True


def _proves_mlp(module: Any, linears: Sequence[nn.Linear], device: torch.device) -> bool:
    twin = _twin(module, device)
    x = _inputs(linears[0].in_features, device)
    names = {id(linear): name for name, linear in module.named_children()}
    outs = [getattr(twin, names[id(linear)])(x) for linear in linears]
    gate, up = outs if len(outs) == 2 else outs[0].chunk(2, dim=-1)
    return _equal(twin.down_proj(F.silu(gate) * up), twin(x))


class _Reference:
    """Attention of a twin: whatever scores are scaled and capped by, both sides have this."""

    def attention(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def _proves_attention(
    plan: AttentionPlan, linears: Sequence[nn.Linear], named: dict[str, Any], device: torch.device
) -> bool:
    module: Any = plan.call.module
    twin = _twin(module, device)
    setattr(twin, HANDLER, _Reference())
    x = _inputs(linears[0].in_features, device)
    positions = torch.arange(PROOF_TOKENS, device=device)
    rotation = _proof_rotation(plan, positions)
    known: dict[str, Any] = {"hidden_states": x, "position_ids": positions[None]}
    known["attention_mask"] = None
    if plan.rotary is not None:
        prompts = torch.zeros_like(positions)
        of_rotary = plan.rotary.rotation(positions.cpu(), prompts.cpu())
        cos, sin = plan.rotary.as_module(of_rotary, torch.float32)
        known["position_embeddings"] = cos.to(device), sin.to(device)
    elif named.get("position_embeddings") is not None:
        angles = _inputs(plan.call.head_dim, device)  # which must make no difference
        known["position_embeddings"] = angles, angles
    others = {n: v for n, v in named.items() if n not in known}
    if any(map(_is_tensor, others.values())):
        raise ValueError("it is given more tensors than these")
    theirs = twin(**{n: v for n, v in known.items() if n in named}, **others)
    names = {id(child): name for name, child in module.named_children()}
    outs = [getattr(twin, names[id(linear)])(x) for linear in linears]
    qkv = torch.cat(outs, dim=-1)[0].unflatten(-1, (-1, plan.call.head_dim))
    norm = None
    if plan.norms is not None:
        norm = HeadNorm(twin.q_norm.weight, twin.k_norm.weight, _eps(module.q_norm))
        if _eps(module.k_norm) != _eps(module.q_norm):
            return False
    heads = plan.call.num_heads, plan.call.num_kv_heads, plan.call.head_dim
    q, k, v = rotated_heads(AttentionLayer(0, *heads, 1.0, head_norm=norm), qkv, rotation)
    out = _Reference().attention(twin, *(each.transpose(0, 1)[None] for each in (q, k, v)))
    ours = getattr(twin, names[id(plan.out_proj)])(out.flatten(2))
    return isinstance(theirs, tuple) and theirs[1:] == (None,) and _equal(ours, theirs[0])


def _proof_rotation(plan: AttentionPlan, positions: torch.Tensor) -> Rotation:
    """Ours, over whole heads whose halves rotate."""
    dim = plan.call.head_dim
    if plan.rotary is None:
        return no_rotation(positions, dim)
    if plan.rotary.dim != dim or plan.rotary.layout != "half":
        raise ValueError("kernels rotate the halves of whole heads")
    rotation = plan.rotary.rotation(positions.cpu(), torch.zeros_like(positions).cpu())
    return Rotation(rotation.rows.to(positions.device), rotation.cos_sin.to(positions.device))


def no_rotation(positions: torch.Tensor, dim: int) -> Rotation:
    """A table of one angle, which is zero."""
    half = torch.ones(1, dim // 2, device=positions.device)
    return Rotation(torch.zeros_like(positions), torch.cat((half, 0 * half), dim=1))


def _is_tensor(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_tensor, value))
    return isinstance(value, torch.Tensor)
