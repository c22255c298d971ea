"""Recurrent layers of transformers models, run by our recurrences.

Their modules call a few functions for all that passes from token to token: a causal convolution,
the scan of Mamba 1 or 2, a delta rule. Such a module gets a subclass whose methods are its own code
with our functions under these names; projections, gates and norms stay its own. A module that
computes the recurrence inline gets a `forward` of ours (both are in transformers_recurrences.py).
It runs without a cache, as if the step's packed row were one sequence; our functions know the
sequences and their states.

The trial on the meta device records a module's calls, as for attention: each is a `StateLayer`.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncllm.attention.base import Mixer
from asyncllm.attention.recurrence import new_output
from asyncllm.kernels.recurrent.records import Convolution, Recurrence, StateLayer
from asyncllm.models.transformers_recurrences import FORWARDS, FUNCTIONS, STATES

LAYERS = "asyncllm_state_layers"  # the attribute of modules with a `StateLayer` per call
MASK_OF_VALUES = "create_recurrent_attention_mask"  # reads a mask's values on the host
RECURRENT_TYPES = {
    "linear_attention", "mamba", "mamba2", "conv", "hybrid", "hybrid_sliding", "moe", "mlp",
}  # fmt: skip
NO_MIXER_TYPES = {"moe", "mlp"}  # layers without attention or recurrence


@dataclass(slots=True)
class StateTrial:
    """Records the recurrences of a forward pass on the meta device."""

    calls: list[tuple[nn.Module, tuple[int, ...], torch.dtype]]

    def recur(self, module: nn.Module, inputs: Recurrence) -> torch.Tensor:
        dtype = inputs.x.dtype if isinstance(inputs, Convolution) else torch.float32
        self.calls.append((module, inputs.state_shape, dtype))
        return new_output(inputs)


class StateStep:
    """The current step, as far as recurrent modules need it."""

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
    """Replace recurrences of modules, and return these modules. `trial` handles them first."""
    found = set()
    for module in model.modules():
        methods = dict(_recurrent_methods(type(module)))
        own = FORWARDS.get(type(module).__name__)
        if methods or own:
            setattr(module, STATES, trial)
            ours = {name: partial(f, weakref.ref(module)) for name, f in FUNCTIONS.items()}
            copies: dict[str, Any] = {
                name: _with_globals(method, ours) for name, method in methods.items()
            }
            if own is not None:
                copies["forward"] = own
            module.__class__ = type(type(module).__name__, (type(module),), copies)
            found.add(module)
    return found


def _recurrent_methods(module_class: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Methods whose code uses one of the replaced functions."""
    for name, method in inspect.getmembers(module_class, inspect.isfunction):
        function = inspect.unwrap(method)  # removes a wrapper for offloaded weights
        if isinstance(function, types.FunctionType) and FUNCTIONS.keys() & {
            *function.__code__.co_names
        }:
            yield name, function


def _with_globals(method: types.FunctionType, values: dict[str, Any]) -> types.FunctionType:
    """A copy of a function with other values for some globals."""
    copy = types.FunctionType(
        method.__code__,
        method.__globals__ | values,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy
