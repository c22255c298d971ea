"""The recurrences in plain torch, in float32: the CPU's, and the reference for every kernel.

`step` moves many sequences on by one token each, `run` one sequence by several, token by token.
Neither changes the state that it is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.kernels.recurrent.records import (
    Convolution,
    DeltaRule,
    Recurrence,
    SelectiveScan,
)

Moved = tuple[torch.Tensor, torch.Tensor]  # output, new state


def tokens_of(inputs: Recurrence, rows: slice) -> Recurrence:
    """The inputs of some of the tokens."""
    match inputs:
        case Convolution(x):
            return inputs._replace(x=x[rows])
        case SelectiveScan(x, dt, _, b, c, _):
            return inputs._replace(x=x[rows], dt=dt[rows], b=b[rows], c=c[rows])
        case DeltaRule(q, k, v, g, beta):
            return DeltaRule(q[rows], k[rows], v[rows], g[rows], beta[rows])


def step(inputs: Recurrence, state: torch.Tensor) -> Moved:
    """Token i moves state[i]: [T, *state_shape]."""
    match inputs:
        case Convolution():
            window = torch.cat((state, inputs.x[:, :, None].to(state.dtype)), dim=2)
            return _convolve(inputs, window)[:, :, 0], window[:, :, 1:]
        case SelectiveScan():
            return _scan_step(inputs, state)
        case DeltaRule():
            return _delta_step(inputs, state)


def run(inputs: Recurrence, state: torch.Tensor) -> Moved:
    """All tokens move `state`, [*state_shape]."""
    if isinstance(inputs, Convolution):
        window = torch.cat((state, inputs.x.T.to(state.dtype)), dim=1)[None]
        num_kept = state.shape[1]
        return _convolve(inputs, window)[0].T, window[0, :, window.shape[2] - num_kept :]
    outputs, num_tokens = [], len(inputs.v if isinstance(inputs, DeltaRule) else inputs.x)
    states = state[None]
    for i in range(num_tokens):
        out, states = step(tokens_of(inputs, slice(i, i + 1)), states)
        outputs.append(out)
    return torch.cat(outputs), states[0]


def _convolve(inputs: Convolution, window: torch.Tensor) -> torch.Tensor:
    """[rows, C, K - 1 + tokens] -> [rows, C, tokens]."""
    weight, bias = inputs.weight, inputs.bias
    out = F.conv1d(window.to(weight.dtype), weight[:, None], bias, groups=len(weight))
    return (F.silu(out) if inputs.silu else out).to(inputs.x.dtype)


def _scan_step(inputs: SelectiveScan, state: torch.Tensor) -> Moved:
    x, dt = inputs.x.float(), inputs.dt.float()[:, :, None, None]
    b, c = (_to_heads(each.float(), x.shape[1])[:, :, None] for each in (inputs.b, inputs.c))
    a = inputs.a if inputs.a.dim() == 2 else inputs.a[:, None]
    moved = torch.exp(dt * a[None, :, None]) * state + dt * x[..., None] * b
    out = (moved * c).sum(-1)
    if inputs.d is not None:
        out = out + inputs.d.float()[None, :, None] * x
    return out, moved


def _delta_step(inputs: DeltaRule, state: torch.Tensor) -> Moved:
    v, beta = inputs.v.float(), inputs.beta.float()[..., None]
    q, k = (_to_heads(each.float(), v.shape[1])[..., None] for each in (inputs.q, inputs.k))
    decay = inputs.g.float().exp()
    moved = state * (decay[..., None] if decay.dim() == 3 else decay[:, :, None, None])
    delta = (v - (k * moved).sum(2)) * beta
    moved = moved + k * delta[:, :, None]
    return (q * moved).sum(2).to(inputs.v.dtype), moved


def _to_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[T, groups, dim] -> [T, heads, dim]"""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)
