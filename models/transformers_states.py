"""The recurrent layers of transformers' own model code, as functions of ours.

Their modules leave what goes from token to token to few functions of their file: a causal
convolution, the scan of Mamba 1 or 2, a delta rule. Such a module gets a subclass whose methods
are its own code with our functions under those names; projections, gates and norms stay its own.
It runs without a cache, as if the step's packed row were one sequence. Where one ends and which
state belongs to it, our functions know.

As attention's, a module's calls are noted in the trial on the meta device: each is a `StateLayer`.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from asyncllm.attention.base import Mixer
from asyncllm.kernels.recurrent.records import (
    Convolution,
    DeltaRule,
    Recurrence,
    SelectiveScan,
    StateLayer,
)
from asyncllm.models.transformers_attention import Unservable

STATES = "asyncllm_states"  # the attribute of recurrent modules: a `StateTrial` or a `StateStep`
LAYERS = "asyncllm_state_layers"  # and a `StateLayer` for each call
MASK_OF_VALUES = "create_recurrent_attention_mask"  # by its values on the host
SILU_NAMES = ("silu", "swish")
RECURRENT_TYPES = {
    "linear_attention", "mamba", "mamba2", "conv", "hybrid", "hybrid_sliding", "moe", "mlp",
}  # fmt: skip
NO_MIXER_TYPES = {"moe", "mlp"}  # layers that neither attend nor recur


@dataclass(slots=True)
class StateTrial:
    """Records the recurrences of one forward pass on the meta device."""

    calls: list[tuple[nn.Module, tuple[int, ...], torch.dtype]]

    def recur(self, module: nn.Module, inputs: Recurrence) -> torch.Tensor:
        match inputs:
            case Convolution(x):
                self.calls.append((module, inputs.state_shape, x.dtype))
                return torch.empty_like(x)
            case SelectiveScan(x):
                self.calls.append((module, inputs.state_shape, torch.float32))
                return torch.empty_like(x, dtype=torch.float32)
            case DeltaRule(v=v):
                self.calls.append((module, inputs.state_shape, torch.float32))
                return torch.empty_like(v)


class StateStep:
    """The step that runs, as far as recurrent modules need to know it."""

    def __init__(self, trial: StateTrial) -> None:
        self.mixer: Mixer | None = None
        self.layers: list[StateLayer] = []
        self._calls: Counter[nn.Module] = Counter()  # in this pass
        for module, shape, dtype in trial.calls:
            layer = StateLayer(len(self.layers), shape, dtype)
            vars(module).setdefault(LAYERS, []).append(layer)
            setattr(module, STATES, self)
            self.layers.append(layer)

    def begin(self, mixer: Mixer | None) -> None:
        self.mixer = mixer
        self._calls.clear()

    def recur(self, module: nn.Module, inputs: Recurrence) -> torch.Tensor:
        assert self.mixer is not None
        layers: list[StateLayer] = getattr(module, LAYERS)
        layer = layers[self._calls[module] % len(layers)]
        self._calls[module] += 1
        return self.mixer.recur(layer, inputs)


def replace_recurrences(model: nn.Module, trial: StateTrial) -> set[nn.Module]:
    """The modules that have any; for the trial first."""
    found = set()
    for module in model.modules():
        methods = dict(_recurrent_methods(type(module)))
        if methods:
            setattr(module, STATES, trial)
            ours = {name: partial(f, weakref.ref(module)) for name, f in FUNCTIONS.items()}
            copies = {name: _with_globals(method, ours) for name, method in methods.items()}
            module.__class__ = type(type(module).__name__, (type(module),), copies)
            found.add(module)
    return found


def _recurrent_methods(module_class: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Those whose code names one of our functions."""
    for name, method in inspect.getmembers(module_class, inspect.isfunction):
        function = inspect.unwrap(method)  # a wrapper for offloaded weights, which are not ours
        if isinstance(function, types.FunctionType) and FUNCTIONS.keys() & {
            *function.__code__.co_names
        }:
            yield name, function


def _with_globals(method: types.FunctionType, values: dict[str, Any]) -> types.FunctionType:
    """The same code, which finds these under their names."""
    copy = types.FunctionType(
        method.__code__,
        method.__globals__ | values,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


# --- the functions, with the arguments of transformers' -----------------------------------------

Ref = Callable[[], nn.Module | None]  # a function that kept its module would be kept by it


def _recur(module_ref: Ref, inputs: Recurrence) -> torch.Tensor:
    module = module_ref()
    assert module is not None, "a module is gone, and its code runs"
    handler: StateTrial | StateStep = getattr(module, STATES)
    return handler.recur(module, inputs)


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
