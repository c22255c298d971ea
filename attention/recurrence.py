"""Recurrences in torch, in float32: for the CPU, and as the reference for kernels.

`step` advances many sequences by one token each, `run` one sequence by several. Neither changes its
input state. If a head's whole state has the same decay, `run` processes chunks of tokens by matrix
products [tokens, tokens] (Mamba 2's state space duality, and the WY form of the delta rule);
otherwise it goes token by token, as `run_by_token`. A decay between two tokens is a sum of
logarithms, never a difference of two cumulative sums, which would lose precision.
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
CHUNK = 32  # tokens; the fastest on a CPU, of 16 to 128


def tokens_of(inputs: Recurrence, rows: slice) -> Recurrence:
    """The inputs of some of the tokens."""
    match inputs:
        case Convolution(x):
            return inputs._replace(x=x[rows])
        case SelectiveScan(x, dt, _, b, c, _):
            return inputs._replace(x=x[rows], dt=dt[rows], b=b[rows], c=c[rows])
        case DeltaRule(q, k, v, g, beta):
            return DeltaRule(q[rows], k[rows], v[rows], g[rows], beta[rows])


def num_tokens(inputs: Recurrence) -> int:
    return len(inputs.v if isinstance(inputs, DeltaRule) else inputs.x)


def new_output(inputs: Recurrence) -> torch.Tensor:
    """The uninitialised output of a recurrence, as `Recur` returns it."""
    match inputs:
        case Convolution(x):
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        case SelectiveScan(x):
            return torch.empty(x.shape, dtype=torch.float32, device=x.device)
        case DeltaRule(v=v):
            return torch.empty_like(v, memory_format=torch.contiguous_format)


def step(inputs: Recurrence, state: torch.Tensor) -> Moved:
    """Token i advances state[i]: [T, *state_shape]."""
    match inputs:
        case Convolution():
            window = torch.cat((state, inputs.x[:, :, None].to(state.dtype)), dim=2)
            return _convolve(inputs, window)[:, :, 0], window[:, :, 1:]
        case SelectiveScan():
            return _scan_step(inputs, state)
        case DeltaRule():
            return _delta_step(inputs, state)


def run(inputs: Recurrence, state: torch.Tensor) -> Moved:
    """All tokens advance `state`, [*state_shape]."""
    if isinstance(inputs, Convolution):
        window = torch.cat((state, inputs.x.T.to(state.dtype)), dim=1)[None]
        num_kept = state.shape[1]
        return _convolve(inputs, window)[0].T, window[0, :, window.shape[2] - num_kept :]
    outputs = []
    for start in range(0, num_tokens(inputs), CHUNK):
        chunk = tokens_of(inputs, slice(start, start + CHUNK))
        match chunk:
            case SelectiveScan(a=a) if a.dim() == 1:
                out, state = _scan_chunk(chunk, state)
            case DeltaRule(g=g) if g.dim() == 2:
                out, state = _delta_chunk(chunk, state)
            case _:
                out, state = run_by_token(chunk, state)
        outputs.append(out)
    return torch.cat(outputs), state


def run_by_token(inputs: Recurrence, state: torch.Tensor) -> Moved:
    """`run` by `step`."""
    outputs, states = [], state[None]
    for i in range(num_tokens(inputs)):
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


def _scan_chunk(inputs: SelectiveScan, state: torch.Tensor) -> Moved:
    x, dt = inputs.x.float().transpose(0, 1), inputs.dt.float().T[..., None]  # [H, T, P or 1]
    b, c = (each.float().transpose(0, 1) for each in (inputs.b, inputs.c))  # [G, T, N]
    per_group = len(x) // len(b)
    decays, since_start = _decays(dt[..., 0] * inputs.a[:, None])
    added = dt * x
    scores = (c @ b.mT).repeat_interleave(per_group, dim=0) * decays
    b, c = (each.repeat_interleave(per_group, dim=0) for each in (b, c))
    out = torch.baddbmm(since_start * (c @ state.mT), scores, added)
    moved = torch.baddbmm(since_start[:, -1:] * state, (decays[:, -1, :, None] * added).mT, b)
    if inputs.d is not None:
        out += inputs.d.float()[:, None, None] * x
    return out.transpose(0, 1), moved


def _delta_chunk(inputs: DeltaRule, state: torch.Tensor) -> Moved:
    """A token's update depends on the updates of the tokens before it, so this solves a triangular
    system [T, T] for each head."""
    num_heads = inputs.v.shape[1]
    v, beta = (each.float().transpose(0, 1) for each in (inputs.v, inputs.beta[..., None]))
    q, k = (_to_heads(each.float(), num_heads).transpose(0, 1) for each in (inputs.q, inputs.k))
    decays, since_start = _decays(inputs.g.float().T)
    beside = beta * (k @ k.mT) * decays  # only entries below the diagonal are read
    alone = beta * (v - since_start * (k @ state))
    added = torch.linalg.solve_triangular(beside, alone, upper=False, unitriangular=True)
    out = torch.baddbmm(since_start * (q @ state), (q @ k.mT) * decays, added)
    kept = since_start[:, -1:] * state
    moved = torch.baddbmm(kept, (decays[:, -1, :, None] * k).mT, added)
    return out.transpose(0, 1).to(inputs.v.dtype), moved


def _decays(logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays from log decays [H, T]: from token s to token t, [H, t, s], 0 for t < s; and from the
    state before the chunk, [H, T, 1]."""
    every = logs.new_ones(logs.shape[1], logs.shape[1], dtype=torch.bool)
    sums = logs[:, :, None].masked_fill(every.triu(), 0.0).cumsum(1)
    return sums.masked_fill_(every.triu(1), -torch.inf).exp_(), logs.cumsum(1).exp_()[..., None]


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
