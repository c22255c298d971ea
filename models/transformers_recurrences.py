"""Replacements of the recurrences in transformers' recurrent modules.

Functions take the arguments of the library's functions, and the calling module first. `FORWARDS`
replace whole modules, by class. Both run recurrences by the module's `STATES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from asyncllm.kernels.recurrent.records import (
    Convolution,
    DeltaRule,
    Recurrence,
    SelectiveScan,
)
from asyncllm.models.transformers_attention import Unservable

STATES = "asyncllm_states"  # the attribute of recurrent modules: a `StateTrial` or a `StateStep`
SILU_NAMES = ("silu", "swish")

Ref = Callable[[], nn.Module | None]  # a weak reference to the module, to avoid a cycle


def _recur(module_ref: Ref, inputs: Recurrence) -> torch.Tensor:
    module = module_ref()
    assert module is not None, "the module was deleted"
    return _move(module, inputs)


def _move(module: Any, inputs: Recurrence) -> torch.Tensor:
    out: torch.Tensor = getattr(module, STATES).recur(module, inputs)
    return out


def _convolution(
    module: Ref,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """hidden_states, result [1, C, T]."""
    if activation is not None and activation not in SILU_NAMES:
        raise Unservable(f"has activation {activation!r} behind a convolution")
    inputs = Convolution(hidden_states[0].T, weight, bias, activation is not None)
    return _recur(module, inputs).T[None]


def _step_sizes(
    dt: torch.Tensor,
    bias: torch.Tensor | None,
    softplus: bool,
    limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """dt, result [T, H]."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit == (0.0, float("inf")) else dt.clamp(*limit)


def _mamba2_scan(
    module: Ref,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> torch.Tensor:
    """hidden_states, result [1, T, H, P]; dt [1, T, H], A [H], B and C [1, T, G, N], D [H]."""
    if z is not None:
        raise Unservable("gives a gate to its scan")
    dt = _step_sizes(dt[0], dt_bias, dt_softplus, (dt_limit[0], dt_limit[1]))
    return _recur(module, SelectiveScan(hidden_states[0], dt, A, B[0], C[0], D))[None]


def _mamba_scan(
    module: Ref,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """hidden_states, dt, z, result [1, I, T]; A [I, N], B and C [1, N, T], D [I]."""
    x, b, c = hidden_states[0].T[..., None], B[0].T[:, None], C[0].T[:, None]
    dt = _step_sizes(dt[0].T, delta_bias, delta_softplus)
    out = _recur(module, SelectiveScan(x, dt, A, b, c, D))[..., 0].T[None]
    return out if z is None else out * F.silu(z)


def _delta_rule(
    module: Ref,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query and key [1, T, Hk, Dk], value and result [1, T, H, Dv], beta [1, T, H]; g the same, or
    Kimi's [1, T, H, Dk]."""
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    inputs = DeltaRule(q, k, value[0], g[0].float(), beta[0].float())
    return _recur(module, inputs)[None], None


def _no_padding(module: Ref, hidden_states: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    return hidden_states


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "apply_mask_to_padding_states": _no_padding,
    "causal_conv1d_fn": _convolution,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}


# --- whole modules that do their recurrences inline ---------------------------------------------


def _lightning_attention(
    self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """MiniMax: a scan with step size 1 and a decay per head. hidden_states, result [1, T, size]."""
    heads = self.act_fn(self.qkv_proj(hidden_states))[0].unflatten(
        1, (self.num_attention_heads, -1)
    )
    q, k, v = heads.split(self.head_dim, dim=2)
    slopes = self.slope_rate.flatten().float()
    steps = slopes.new_ones(heads.shape[:2])
    out = _move(self, SelectiveScan(v, steps, -slopes, k, q, None))
    out = self.norm(out.flatten(1)[None].to(hidden_states.dtype))
    return self.out_proj(self.output_gate(hidden_states).sigmoid() * out), None


def _convolved_heads(
    self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ZAYA: q, k, v [1, T, heads, head_dim] of hidden_states [1, T, size]. q and k pass two
    convolutions, of which the second mixes a head's entries; half of v is of the token before."""
    q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
    both = torch.cat((q, k), dim=2)[0]
    window = [_delayed(self, both, n) for n in range(self.conv_kernel_size, 0, -1)]
    convolved = self.conv_qk_grouped(self.conv_qk_depthwise(torch.stack([*window, both], dim=2)))
    heads = convolved[..., 0][None].unflatten(2, (-1, self.head_dim))
    # The mean of each query head and its key head is added to both; for k averaged over its query
    # heads.
    q, k = (each.unflatten(2, (-1, self.head_dim)) for each in (q, k))
    plain = (q + k.repeat_interleave(self.num_key_value_groups, dim=2)) * 0.5
    of_keys = plain.unflatten(2, (-1, self.num_key_value_groups)).mean(dim=3)
    before = self.v_proj_delayed(_delayed(self, hidden_states[0], 1)[None])
    v = torch.cat((self.v_proj_current(hidden_states), before), dim=2)
    num_heads = self.num_attention_heads
    out = heads[:, :, :num_heads] + plain, heads[:, :, num_heads:] + of_keys
    return *out, v.unflatten(2, (-1, self.head_dim))


def _delayed(module: Any, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """x delayed by `num_tokens`, zeros before the first token: [T, C]."""
    weight = x.new_zeros(x.shape[1], num_tokens + 1)
    weight[:, 0] = 1
    return _move(module, Convolution(x, weight, None, silu=False))


FORWARDS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _lightning_attention,
    "ZayaCCAProjection": _convolved_heads,
}
