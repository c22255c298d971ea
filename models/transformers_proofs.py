"""Proofs that our code computes the same as a module of transformers.

A copy of the module gets random weights in float32, and its own code and ours get the same inputs.
Our code is used only if the outputs are equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from asyncllm.attention.base import AttentionLayer, HeadNorm, Rotation
from asyncllm.attention.heads import rotated_heads
from asyncllm.models.transformers_attention import AttentionCall
from asyncllm.models.transformers_modules import Siblings, eps_of, no_rotation
from asyncllm.models.transformers_rope import HANDLER, StepRotary

PROOF_TOKENS = 5
TOLERANCE = 1e-4  # relative, in float32


@dataclass(slots=True)
class AttentionPlan:
    """A layer whose attention ours replaces."""

    call: AttentionCall
    siblings: Siblings
    out_proj: nn.Module
    rotary: StepRotary | None
    norms: tuple[Any, Any] | None  # of q and of k


def holds(proves: Callable[..., bool], *arguments: Any) -> bool:
    """Whether the proof succeeds. If the module's code raises, it does not."""
    try:
        with torch.inference_mode():
            return proves(*arguments)
    except Exception:
        return False


def random_twin(module: Any, device: torch.device) -> Any:
    """A copy of the module with random weights in float32, which shares its configuration."""
    handler = getattr(module, HANDLER, None)
    memo = {id(each): each for each in (handler, getattr(module, "config", None))}
    for child in module.modules():
        memo |= {id(v): v for v in (getattr(child, "config", None), getattr(child, HANDLER, None))}
    twin = copy.deepcopy(module, memo).to_empty(device=device).float()
    generator = torch.Generator(device).manual_seed(0)
    # Numbers are repeated: drawing all of a large layer's would take longer than loading it.
    drawn = torch.randn(65_537, device=device, generator=generator)
    for parameter in twin.parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + 0.3 * drawn[torch.arange(len(parameter), device=device) % 65_537]
        else:
            repeats = -(-parameter.numel() // len(drawn))
            values = drawn.repeat(repeats)[: parameter.numel()].view(parameter.shape)
            parameter.data = values.mul_(parameter.shape[-1] ** -0.5)
    return twin


def random_inputs(size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(1, PROOF_TOKENS, size, device=device, generator=generator)


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    difference = (ours - theirs).norm() <= TOLERANCE * theirs.norm()
    return ours.shape == theirs.shape and bool(difference)


def proves_norm(module: Any, offset: float, device: torch.device) -> bool:
    twin = random_twin(module, device)
    x = random_inputs(len(twin.weight), device)
    for scale in (1.0, float(eps_of(module)) ** 0.5):  # the second one depends on eps
        x32 = x * scale
        ours = x32 * (x32.square().mean(-1, keepdim=True) + eps_of(module)).rsqrt()
        if not equal(ours * (twin.weight + offset), twin(x32)):
            return False
    return True


def proves_mlp(module: Any, linears: Sequence[nn.Linear], device: torch.device) -> bool:
    twin = random_twin(module, device)
    x = random_inputs(linears[0].in_features, device)
    names = {id(linear): name for name, linear in module.named_children()}
    outs = [getattr(twin, names[id(linear)])(x) for linear in linears]
    gate, up = outs if len(outs) == 2 else outs[0].chunk(2, dim=-1)
    return equal(twin.down_proj(F.silu(gate) * up), twin(x))


class _Reference:
    """The attention of both sides of a proof; scaling and soft caps do not matter."""

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


def proves_attention(
    plan: AttentionPlan, linears: Sequence[nn.Linear], named: dict[str, Any], device: torch.device
) -> bool:
    module: Any = plan.call.module
    twin = random_twin(module, device)
    setattr(twin, HANDLER, _Reference())
    x = random_inputs(linears[0].in_features, device)
    positions = torch.arange(PROOF_TOKENS, device=device)
    rotation = _proof_rotation(plan, positions)
    known: dict[str, Any] = {"hidden_states": x, "position_ids": positions[None]}
    known["attention_mask"] = None
    if plan.rotary is not None:
        known["position_embeddings"] = plan.rotary.as_module(rotation, torch.float32)
    elif named.get("position_embeddings") is not None:
        angles = random_inputs(plan.call.head_dim, device)  # the module must ignore them
        known["position_embeddings"] = angles, angles
    others = {n: v for n, v in named.items() if n not in known}
    if any(map(_is_tensor, others.values())):
        raise ValueError("it takes other tensors")
    theirs = twin(**{n: v for n, v in known.items() if n in named}, **others)
    names = {id(child): name for name, child in module.named_children()}
    outs = [getattr(twin, names[id(linear)])(x) for linear in linears]
    qkv = torch.cat(outs, dim=-1)[0].unflatten(-1, (-1, plan.call.head_dim))
    norm = None
    if plan.norms is not None:
        norm = HeadNorm(twin.q_norm.weight, twin.k_norm.weight, eps_of(module.q_norm))
        if eps_of(module.k_norm) != eps_of(module.q_norm):
            return False
    heads = plan.call.num_heads, plan.call.num_kv_heads, plan.call.head_dim
    q, k, v = rotated_heads(AttentionLayer(0, *heads, 1.0, head_norm=norm), qkv, rotation)
    out = _Reference().attention(twin, *(each.transpose(0, 1)[None] for each in (q, k, v)))
    ours = getattr(twin, names[id(plan.out_proj)])(out.flatten(2))
    return isinstance(theirs, tuple) and theirs[1:] == (None,) and equal(ours, theirs[0])


def _proof_rotation(plan: AttentionPlan, positions: torch.Tensor) -> Rotation:
    """Our rotation, which is NeoX-style over whole heads."""
    dim = plan.call.head_dim
    if plan.rotary is None:
        return no_rotation(positions, dim)
    if plan.rotary.dim != dim or plan.rotary.layout != "half":
        raise ValueError("kernels rotate the halves of whole heads")
    rotation = plan.rotary.rotation(positions.cpu(), torch.zeros_like(positions).cpu())
    return Rotation(rotation.rows.to(positions.device), rotation.cos_sin.to(positions.device))


def _is_tensor(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_tensor, value))
    return isinstance(value, torch.Tensor)
