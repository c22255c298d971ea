"""A trial run of a transformers model on the meta device, before it has weights.

It records which modules attend and how (transformers_attention.py), which module returns the hidden
states, whether positions reach the modules that rotate or embed them, and which parts of the model
text does not use.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncllm.errors import one_line
from asyncllm.models.transformers_attention import AttentionCall, Trial, Unservable
from asyncllm.models.transformers_build import META, tensors_of
from asyncllm.models.transformers_rope import HANDLER, rotary_modules
from asyncllm.models.transformers_states import (
    MASK_OF_VALUES,
    NO_MIXER_TYPES,
    StateTrial,
    replace_recurrences,
)

TRIAL_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Tried:
    """The record of a trial run."""

    calls: list[AttentionCall]
    states: StateTrial
    base: Any  # the module that returns the hidden states
    output: type  # the class of its return value
    idle: list[str]  # names of its towers that text does not use
    takes_positions: bool  # else only modules that embed positions need them, or none does
    named: dict[nn.Module, dict[str, Any]]  # module -> its keyword arguments
    angles: list[tuple[tuple[Any, str | None], Any]]  # (rotary module, layer type), its output


def try_on_meta(model: Any, max_model_len: int) -> Tried:
    trial, states = Trial(max_model_len), StateTrial([])
    recurrent = replace_recurrences(model, states)
    if model._is_stateful and not recurrent:
        raise Unservable("has recurrent layers of its own kind")
    arguments: dict[nn.Module, dict[str, Any]] = {}  # by name, of modules that ran
    outputs: list[tuple[nn.Module, Any]] = []  # of modules that may be the base model
    angles: list[tuple[tuple[Any, str | None], Any]] = []
    bases, rotaries = _bases(model), rotary_modules(model)

    def note(module: Any, positional: Any, named: dict[str, Any], output: Any) -> None:
        arguments[module] = named
        if module in bases:
            outputs.append((module, output))
        if module in rotaries:
            layer_type = positional[2] if len(positional) > 2 else named.get("layer_type")
            angles.append(((module, layer_type), output))

    for module in model.modules():
        setattr(module, HANDLER, trial)
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    tokens, positions = torch.zeros(2, 1, TRIAL_TOKENS, dtype=torch.int64, device=META)
    # Recurrent layers look at the mask's values, and drop a mask that hides nothing.
    looks = recurrent or hasattr(inspect.getmodule(type(model)), MASK_OF_VALUES)
    mask = torch.ones(1, TRIAL_TOKENS, dtype=torch.int64) if looks else tokens + 1
    try:
        # Views of a mask have it as `_base`, but not in inference mode.
        with _tensors_on_meta(model), torch.inference_mode(False), torch.no_grad():
            model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    except Unservable:
        raise
    except Exception as error:  # the model's code may raise anything on the meta device
        raise Unservable(f"cannot be tried: {type(error).__name__}: {one_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    text = model.config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    is_of_all = window and getattr(text, "layer_types", None) is None and window < max_model_len
    if is_of_all and any(call.window is None for call in trial.calls):  # only its cache has one
        raise Unservable(f"has sliding_window {window}, and masks without a window")
    if model._is_stateful and not states.calls:
        raise Unservable("has recurrent layers of its own kind")
    num_modules = len({call.module for call in trial.calls})
    if not states.calls and num_layers not in (num_modules, len(trial.calls)):
        raise Unservable(f"attends in {num_modules} of num_hidden_layers {num_layers}")
    layer_types = getattr(text, "layer_types", None) or ()
    num_others = sum(each in NO_MIXER_TYPES for each in layer_types)
    num_modules += len({module for module, _, _ in states.calls})
    if states.calls and num_modules < num_layers - num_others:
        raise Unservable(f"attends or recurs in {num_modules} of num_hidden_layers {num_layers}")
    if not outputs or getattr(outputs[-1][1], "last_hidden_state", None) is None:
        raise Unservable("does not get its hidden states from its base model")
    base: Any
    base, output = outputs[-1]  # the outermost ends last
    takes_positions = any(
        arguments.get(module, {}).get("position_ids") is positions
        for module in base.modules()
        if "position_ids" in inspect.signature(module.forward).parameters
    )
    has_use = any(call.slopes is None for call in trial.calls)
    if not takes_positions and has_use and not list(position_modules(base)):
        raise Unservable(f"has a {type(base).__name__} that takes no position_ids")
    idle = [] if text is model.config else list(_idle(model, base, arguments.keys()))
    return Tried(
        *(trial.calls, states, base, type(output), idle, takes_positions, arguments, angles)
    )


def _idle(model: nn.Module, base: nn.Module, ran: Set[nn.Module]) -> Iterator[str]:
    """Names of the base's children that did not run at all: towers for other inputs."""
    prefix = next(name for name, module in model.named_modules() if module is base)
    for name, child in base.named_children():
        if ran.isdisjoint(child.modules()) and any(True for _ in child.parameters()):
            yield f"{prefix}.{name}".removeprefix(".")


def position_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that embed positions, which their model counts from the length of its cache."""
    wanted = {"past_key_values_length", "position_ids"}
    for module in model.modules():
        if wanted <= inspect.signature(module.forward).parameters.keys():
            yield module


def _bases(model: Any) -> list[nn.Module]:
    """Modules that may return the hidden states that the head takes."""
    named = (getattr(model, name, None) for name in {model.base_model_prefix, "model"})
    bases: list[Any] = [base for base in named if isinstance(base, nn.Module)]
    decoders = [
        base.decoder for base in bases if isinstance(getattr(base, "decoder", 0), nn.Module)
    ]
    return [*decoders, *bases]


@contextmanager
def _tensors_on_meta(model: nn.Module) -> Iterator[None]:
    """Move buffers, and tensors that are plain attributes, to the meta device for a while."""
    kept = [(owner, {**owner}) for module in model.modules() for owner in tensors_of(module)]
    for owner, its in kept:
        # Scalars keep their values: some classes divide scores by one.
        tensors = {n: t for n, t in its.items() if isinstance(t, torch.Tensor) and t.dim()}
        owner.update({n: t.to(META) for n, t in tensors.items()})
    try:
        yield
    finally:
        for owner, its in kept:
            owner.update(its)
