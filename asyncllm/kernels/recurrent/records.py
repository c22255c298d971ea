"""Records of recurrent layers: what one keeps of a sequence, and the inputs of one step.

A recurrent layer keeps a state of fixed size for each sequence, in whose row of the state memory a
step's tokens change it (attention/state_cache.py). T tokens of a step, those of one sequence in
order; each of the three recurrences is linear in its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One tensor of state for each sequence. `index`: its place among the model's."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Convolution(NamedTuple):
    """Causal, each channel by itself: out[t] = activation(sum of weight[k] * x[t - K + 1 + k]).

    State [C, K - 1]: the last inputs.
    """

    x: torch.Tensor  # [T, C]
    weight: torch.Tensor  # [C, K]
    bias: torch.Tensor | None  # [C]
    silu: bool

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.weight.shape[0], self.weight.shape[1] - 1)


class SelectiveScan(NamedTuple):
    """Mamba's: state = exp(dt * a) * state + dt * x * b, out = state . c + d * x.

    H heads of P channels; each of the G groups of b and c serves H / G heads. State [H, P, N].
    Mamba 1 has heads of one channel, with an `a` for each entry of the state.
    """

    x: torch.Tensor  # [T, H, P]
    dt: torch.Tensor  # [T, H]
    a: torch.Tensor  # float32 [H] or [H, N], negative
    b: torch.Tensor  # [T, G, N]
    c: torch.Tensor  # [T, G, N]
    d: torch.Tensor | None  # [H]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[1:], self.b.shape[2])


class DeltaRule(NamedTuple):
    """Gated delta rule: state = exp(g) * state, then + k (x) beta * (v - k . state);
    out = q . state.

    Each of the heads of q and k serves H / Hk heads of v. State [H, Dk, Dv]. With `g` of [T, H, Dk]
    each row of the state has a decay of its own (Kimi's).
    """

    q: torch.Tensor  # [T, Hk, Dk], scaled
    k: torch.Tensor  # [T, Hk, Dk]
    v: torch.Tensor  # [T, H, Dv]
    g: torch.Tensor  # [T, H] or [T, H, Dk], at most 0
    beta: torch.Tensor  # [T, H]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.v.shape[1], self.k.shape[2], self.v.shape[2])


Recurrence = Convolution | SelectiveScan | DeltaRule
# One step's, bound to its batch: the layer's states move on by all tokens. The output is [T, C],
# [T, H, P] or [T, H, Dv], in the dtype of x or v; of a scan in float32.
Recur = Callable[[StateLayer, Recurrence], torch.Tensor]
