"""Any causal LM of transformers' table as a `CausalLM`: its model code over our paged attention.

transformers computes all but attention. A step is one packed row, without its cache and its masks.
The head runs on the sampled rows only, by the class's own forward with the hidden states given, so
that what follows it (soft caps, scales) is the class's own. No code of a model folder is run.

A model is built with its parameters on the meta device and its buffers computed, as only the class
knows how; after a trial there (transformers_attention.py) its parameters get their memory.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from asyncllm.attention.base import AttentionLayer, Mixer, Rotation
from asyncllm.errors import ModelLoadError, one_line
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load, TokenInputs
from asyncllm.models.layers.build import Build
from asyncllm.models.transformers_attention import (
    LAYER,
    RUN,
    TRIAL,
    AttentionCall,
    HeadShape,
    Rotations,
    Step,
    Trial,
    Unservable,
)
from asyncllm.models.transformers_experts import replace_experts
from asyncllm.models.transformers_fusion import Fusion, has_projections, no_rotation
from asyncllm.models.transformers_indexed import SEEN, check_index, leave_out_index
from asyncllm.models.transformers_legacy import (
    LEGACY,
    check_legacy,
    replace_attention,
)
from asyncllm.models.transformers_rope import (
    HANDLER,
    STATIC_ROPE_TYPES,
    StepRotary,
    replace_angles,
    rotary_modules,
)
from asyncllm.models.transformers_states import (
    MASK_OF_VALUES,
    NO_MIXER_TYPES,
    RECURRENT_TYPES,
    StateStep,
    StateTrial,
    replace_recurrences,
)
from asyncllm.models.transformers_weights import WeightNames

logger = logging.getLogger("asyncllm")

META = torch.device("meta")
TRIAL_TOKENS = 3
KERNEL_HEAD_DIMS = (64, 128, 256)  # of 16-bit types; torch's attention takes any
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *SEEN}


class TransformersModel:
    """A `CausalLM`; see there for shapes."""

    full_read_tokens = 1  # how many experts there are, its classes say by many names

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """Raises `ModelLoadError` where the class would not compute what it does by itself."""
        try:
            self._model = model = _without_weights(config, build)
            rotaries = _step_rotaries(model, build.max_model_len)
            tried = _try(model, build.max_model_len)
            self._base, self._output = tried.base, tried.output
            self._names = WeightNames(model, config.path)
            self.left_out = tried.idle
            for name in tried.idle:
                self._names.leave_out(name, model.get_submodule(name))
                model.set_submodule(name, nn.Identity())
            if tried.idle and build.device != META:
                logger.info("serving text alone, without %s", ", ".join(tried.idle))
            shape = HeadShape.of(tried.calls, KERNEL_HEAD_DIMS if build.dtype.itemsize == 2 else ())
            # On the meta device there is nothing to prove, and nobody runs it.
            fusion = None if build.device == META else _fuse(model, tried, shape, rotaries, build)
            _allocate(model, build.device)
            head_norm = fusion.head_norm if fusion is not None else lambda call: None
            self._step = step = Step(tried.calls, shape, head_norm)
            self._states = StateStep(tried.states)
        except Unservable as error:
            raise ModelLoadError(
                f"{config.path / 'config.json'}: architectures {config.architecture!r} {error}, "
                "which is not served"
            ) from error
        # A start warms kernels up in threads of its own, and the step is the model's, not a call's.
        self._running = threading.Lock()
        for module in model.modules():
            setattr(module, HANDLER, step)
        for call, layer in zip(tried.calls, step.layers, strict=True):
            vars(call.module).setdefault(LAYER, []).append(layer)
        self._takes_positions = tried.takes_positions
        if not tried.takes_positions:
            for module in position_modules(model):
                give_positions(module)
        if config.architecture not in LEGACY:
            model.set_attn_implementation(RUN)
        if fusion is not None:
            fusion.apply(step, build.ops)
        _let_give(self._base)
        self._fusion = fusion
        self.attention_layers: list[AttentionLayer] = step.layers
        self.state_layers = self._states.layers
        self.uses_prompt_lens = any(rotary.uses_prompt_lens for rotary in rotaries.values())
        self._rotaries = list(rotaries.values())
        for rotary in self._rotaries:
            rotary.to(build.device)
        self._no_rotation = no_rotation(torch.zeros(1, device=build.device), shape.head_dim)

    @property
    def aliases(self) -> Mapping[str, str | None]:
        return self._names.aliases

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        with self._running:
            return self._forward(inputs, mixer)

    def _forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        step, positions = self._step, inputs.positions
        # Before the first layer: kernels read them before their wait.
        rotations: Rotations = {
            rotary: rotary.rotation(positions, inputs.prompt_lens) for rotary in self._rotaries
        }
        rotations[None] = Rotation(torch.zeros_like(positions), self._no_rotation.cos_sin)
        step.begin(mixer, positions, rotations)
        self._states.begin(mixer)
        named = {"position_ids": positions.long()[None]} if self._takes_positions else {}
        try:
            output = self._base(input_ids=inputs.ids.long()[None], use_cache=False, **named)
        finally:
            step.mixer = None
            self._states.begin(None)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self._running:
            self._base.given = self._output(last_hidden_state=hidden[None])
            try:
                logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            finally:
                self._base.given = None
        return logits.to(hidden.dtype)

    def loads(self) -> Iterator[Load]:
        return self._names.loads()

    def finish_loading(self) -> None:
        self._names.finish_loading()
        self._step.finish_loading()
        if self._fusion is not None:
            self._fusion.finish_loading()


def _without_weights(config: ModelConfig, build: Build) -> Any:
    """The class's model: buffers on the CPU, parameters on the meta device."""
    model_class = getattr(transformers, config.architecture)
    if not isinstance(config.hf_config, model_class.config_class):
        raise Unservable(f"does not fit model_type {config.hf_config.model_type!r}")
    text, dtype = config.hf_config.get_text_config(decoder=True), build.dtype
    layer_types = set(getattr(text, "layer_types", None) or ())
    kinds = layer_types - SERVED_LAYER_TYPES - RECURRENT_TYPES
    if kinds:
        raise Unservable(f"has layer_types {', '.join(sorted(map(repr, kinds)))}")
    check_index(text, build.max_model_len)
    is_legacy = config.architecture in LEGACY
    if is_legacy:
        check_legacy(config.architecture, config.hf_config)
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = (
            None  # between an image's tokens, of which there are none
        )
    try:
        with no_init_weights(), _parameters_on_meta():
            model = model_class._from_config(
                config.hf_config, dtype=dtype, attn_implementation="eager" if is_legacy else TRIAL
            )
            model.tie_weights()
    except Exception as error:  # a class's own checks have no common base
        raise Unservable(f"cannot be built: {one_line(error)}") from error
    if is_legacy:
        replace_attention(model)
    _keep_in_float32(model, dtype)
    replace_experts(model)
    leave_out_index(model)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Each parameter that a module registers in this thread has no memory; buffers are as made.

    torch's meta device as a context would take the buffers, too. Modules that an application builds
    in another thread meanwhile are left alone.
    """
    register, builder = nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_ours = threading.get_ident() == builder
        if is_ours and parameter is not None and parameter.device != META:
            parameter = nn.Parameter(parameter.detach().to(META), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """What the class wants so: some for float16 only, some always."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if kept & {*module_name.split("."), *name.split(".")}:
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)


Rotaries = dict[tuple[Any, str | None], StepRotary]  # by module and type of layers


def _step_rotaries(model: nn.Module, max_model_len: int) -> Rotaries:
    """Of the modules whose angles we know. Those that depend on a sequence's length, of which a
    packed row has several, give ours from now on."""
    found: Rotaries = {}
    for module in rotary_modules(model):
        types = [*module.rope_type] if isinstance(module.rope_type, dict) else [None]
        for layer_type in types:
            kind = module.rope_type[layer_type] if layer_type else module.rope_type
            if kind == "axial":  # of images
                continue
            try:
                found[module, layer_type] = StepRotary(module, layer_type, max_model_len)
            except Exception as error:  # of no common base, as what the module does
                if kind not in STATIC_ROPE_TYPES:
                    raise Unservable(f"has rope_type {kind!r} ({one_line(error)})") from error
        if any(found[key].by_length for key in found if key[0] is module):
            replace_angles(module, {t: found[module, t] for t in types})
    return found


@dataclass(frozen=True, slots=True)
class Tried:
    """What one pass on the meta device has shown."""

    calls: list[AttentionCall]
    states: StateTrial
    base: Any  # the module that gives the hidden states
    output: type  # of what it returns
    idle: list[str]  # its towers that text does not pass
    takes_positions: bool  # else modules that embed them take them, or there is no use for them
    named: dict[nn.Module, dict[str, Any]]  # modules with projections -> their arguments
    angles: list[tuple[tuple[Any, str | None], Any]]  # by whom cosines and sines were given


def _try(model: Any, max_model_len: int) -> Tried:
    trial, states = Trial(max_model_len), StateTrial([])
    recurrent = replace_recurrences(model, states)
    outputs: list[tuple[nn.Module, Any]] = []
    named: dict[nn.Module, dict[str, Any]] = {}
    given: dict[nn.Module, Any] = {}  # what modules got as their positions
    angles: list[tuple[tuple[Any, str | None], Any]] = []
    for module in model.modules():
        setattr(module, HANDLER, trial)

    def note_angles(module: Any, arguments: Any, others: dict[str, Any], output: Any) -> None:
        layer_type = arguments[2] if len(arguments) > 2 else others.get("layer_type")
        angles.append(((module, layer_type), output))

    hooks = [
        base.register_forward_hook(lambda module, _, output: outputs.append((module, output)))
        for base in _bases(model)
    ]
    hooks += [
        module.register_forward_hook(note_angles, with_kwargs=True)
        for module in rotary_modules(model)
    ]
    hooks += [
        module.register_forward_pre_hook(
            lambda module, _, others: named.__setitem__(module, others), with_kwargs=True
        )
        for module in model.modules()
        if has_projections(module)
    ]
    hooks += [
        module.register_forward_pre_hook(
            lambda module, _, others: given.__setitem__(module, others.get("position_ids")),
            with_kwargs=True,
        )
        for module in model.modules()
        if "position_ids" in inspect.signature(module.forward).parameters
    ]
    ran: set[nn.Module] = set()
    hooks += [
        module.register_forward_hook(lambda module, *_: ran.add(module))
        for module in model.modules()
    ]
    tokens, positions = torch.zeros(2, 1, TRIAL_TOKENS, dtype=torch.int64, device=META)
    # Recurrent layers look at its values, and drop one that hides nothing.
    looks = recurrent or hasattr(inspect.getmodule(type(model)), MASK_OF_VALUES)
    mask = torch.ones(1, TRIAL_TOKENS, dtype=torch.int64) if looks else tokens + 1
    try:
        # Views of a mask name it as their base, but not in inference mode.
        with _tensors_on_meta(model), torch.inference_mode(False), torch.no_grad():
            model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    except Unservable:
        raise
    except Exception as error:  # whatever its code cannot do there
        raise Unservable(f"cannot be tried: {type(error).__name__}: {one_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    text = model.config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    window = getattr(text, "sliding_window", None)
    is_of_all = window and getattr(text, "layer_types", None) is None and window < max_model_len
    if is_of_all and any(call.window is None for call in trial.calls):  # but its cache forgets
        raise Unservable(f"has sliding_window {window}, and masks without a window")
    if model._is_stateful and not states.calls:
        raise Unservable("has recurrent layers of its own kind")
    num_modules = len({call.module for call in trial.calls})
    if not states.calls and num_layers not in (num_modules, len(trial.calls)):
        raise Unservable(f"attends in {num_modules} of num_hidden_layers {num_layers}")
    layer_types = getattr(text, "layer_types", None) or ()
    num_others = sum(each in NO_MIXER_TYPES for each in layer_types)
    num_modules += len({module for module, _, _ in states.calls})
    if num_modules < num_layers - num_others:
        raise Unservable(f"attends or recurs in {num_modules} of num_hidden_layers {num_layers}")
    if not outputs or getattr(outputs[-1][1], "last_hidden_state", None) is None:
        raise Unservable("does not get its hidden states from its base model")
    base: Any
    base, output = outputs[-1]  # the outermost ends last
    takes_positions = any(given.get(module) is positions for module in base.modules())
    has_use = any(call.slopes is None for call in trial.calls)
    if not takes_positions and has_use and not list(position_modules(base)):
        raise Unservable(f"has a {type(base).__name__} that takes no position_ids")
    idle = [] if text is model.config else list(_idle(model, base, ran))
    return Tried(trial.calls, states, base, type(output), idle, takes_positions, named, angles)


def _idle(model: nn.Module, base: nn.Module, ran: set[nn.Module]) -> Iterator[str]:
    """Names of the base's children of which nothing ran: towers of other inputs."""
    prefix = next(name for name, module in model.named_modules() if module is base)
    for name, child in base.named_children():
        if ran.isdisjoint(child.modules()) and any(True for _ in child.parameters()):
            yield f"{prefix}.{name}".removeprefix(".")


def position_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Those that embed positions, which their model counts from the length of its cache."""
    wanted = {"past_key_values_length", "position_ids"}
    for module in model.modules():
        if wanted <= inspect.signature(module.forward).parameters.keys():
            yield module


class _GivenPositions(nn.Module):
    def forward(self, *args: Any, **named: Any) -> Any:
        step: Step = getattr(self, HANDLER)
        return super().forward(*args, **named | {"position_ids": step.positions})


def give_positions(module: nn.Module) -> None:
    """Those of the step, whatever the model has counted."""
    module.__class__ = type(type(module).__name__, (_GivenPositions, type(module)), {})


def _fuse(model: Any, tried: Tried, shape: HeadShape, rotaries: Rotaries, build: Build) -> Fusion:
    """What is proved to be ours; what is merged has its memory."""
    fusion = Fusion(model, build.dtype, build.device)
    for call in tried.calls:
        arguments = tried.named.get(call.module, {})
        given = arguments.get("position_embeddings")
        by = [rotaries[key] for key, output in tried.angles if output is given and key in rotaries]
        is_only = sum(call.module is other.module for other in tried.calls) == 1
        if is_only and shape.is_of(call):
            fusion.add_attention(call, arguments, [*by[:1], None])
    fusion.allocate(build.device)
    if build.device.type == "cuda":
        torch.cuda.empty_cache()  # of the proofs
    return fusion


def _let_give(base: Any) -> None:
    """Let a base model return its attribute `given`, where there is one, instead of computing."""
    model_class = type(base)

    def forward(self: Any, *args: Any, **arguments: Any) -> Any:
        if self.given is not None:
            return self.given
        return model_class.forward(self, *args, **arguments)

    base.given = None
    # A subclass, as a function of this one module would keep the module that keeps it.
    # The library's tables of names hold for modules of its own.
    changes = {"forward": forward, "__module__": model_class.__module__}
    base.__class__ = type(model_class.__name__, (model_class,), changes)


def _bases(model: Any) -> list[nn.Module]:
    """The modules of which one gives the hidden states to the head."""
    named = (getattr(model, name, None) for name in {model.base_model_prefix, "model"})
    bases: list[Any] = [base for base in named if isinstance(base, nn.Module)]
    decoders = [
        base.decoder for base in bases if isinstance(getattr(base, "decoder", 0), nn.Module)
    ]
    return [*decoders, *bases]


@contextmanager
def _tensors_on_meta(model: nn.Module) -> Iterator[None]:
    """Buffers, and tensors that are neither buffer nor parameter."""
    kept = [(owner, {**owner}) for module in model.modules() for owner in _owners(module)]
    for owner, its in kept:
        # Numbers keep their values: what scores are divided by is one in some classes.
        tensors = {n: t for n, t in its.items() if isinstance(t, torch.Tensor) and t.dim()}
        owner.update({n: t.to(META) for n, t in tensors.items()})
    try:
        yield
    finally:
        for owner, its in kept:
            owner.update(its)


def _owners(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, vars(module)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters that have none, shared where they are tied; other tensors to the
    device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device == META:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = made[id(parameter)]
        for owner in _owners(module):
            owner.update({n: t.to(device) for n, t in owner.items() if isinstance(t, torch.Tensor)})
