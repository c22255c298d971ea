"""Any causal LM of transformers' table as a `CausalLM`: its model code over our paged attention.

transformers computes all but attention. A step is one packed row, without its cache and its masks.
The head runs on the sampled rows only, by the class's own forward with the hidden states given, so
that what follows it (soft caps, scales) is the class's own. No code of a model folder is run.

A model is built with its parameters on the meta device and its buffers computed, as only the class
knows how; after a trial there (transformers_attention.py) its parameters get their memory.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from asyncllm.attention.base import AttentionLayer, Mixer
from asyncllm.errors import ModelLoadError, one_line
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import Load, TokenInputs
from asyncllm.models.layers.build import Build
from asyncllm.models.transformers_attention import (
    HANDLER,
    LAYER,
    RUN,
    TRIAL,
    AttentionCall,
    Step,
    Trial,
    Unservable,
)
from asyncllm.models.transformers_weights import WeightNames

META = torch.device("meta")
TRIAL_TOKENS = 3
EXPERTS = "asyncllm"
KERNEL_HEAD_DIMS = (64, 128, 256)  # of 16-bit types; torch's attention takes any
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


class TransformersModel:
    """A `CausalLM`; see there for shapes."""

    uses_prompt_lens = False

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """Raises `ModelLoadError` where the class would not compute what it does by itself."""
        try:
            self._model = model = _without_weights(config, build.dtype)
            _settle_rope(model, build.max_model_len)
            calls, self._base, self._output = _try(model, build.max_model_len)
            self._names = WeightNames(model, config.path)
            _allocate(model, build.device)
            self._step = Step(calls, KERNEL_HEAD_DIMS if build.dtype.itemsize == 2 else ())
        except Unservable as error:
            raise ModelLoadError(
                f"{config.path / 'config.json'}: architectures {config.architecture!r} {error}, "
                "which is not served"
            ) from error
        for module in model.modules():
            setattr(module, HANDLER, self._step)
        for call, layer in zip(calls, self._step.layers, strict=True):
            setattr(call.module, LAYER, layer)
        model.set_attn_implementation(RUN)
        _let_give(self._base)
        self.attention_layers: list[AttentionLayer] = self._step.layers

    @property
    def aliases(self) -> Mapping[str, str | None]:
        return self._names.aliases

    def forward(self, inputs: TokenInputs, mixer: Mixer) -> torch.Tensor:
        step = self._step
        step.mixer = mixer
        try:
            output = self._base(
                input_ids=inputs.ids.long()[None],
                position_ids=inputs.positions.long()[None],
                use_cache=False,
            )
        finally:
            step.mixer = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
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


def _without_weights(config: ModelConfig, dtype: torch.dtype) -> Any:
    """The class's model: buffers on the CPU, parameters on the meta device."""
    model_class = getattr(transformers, config.architecture)
    if not isinstance(config.hf_config, model_class.config_class):
        raise Unservable(f"does not fit model_type {config.hf_config.model_type!r}")
    kinds = set(getattr(config.hf_config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if kinds:
        raise Unservable(f"has layer_types {', '.join(sorted(map(repr, kinds)))}")
    if model_class._is_stateful:
        raise Unservable("has recurrent layers")
    try:
        with no_init_weights(), _parameters_on_meta():
            model = model_class._from_config(
                config.hf_config, dtype=dtype, attn_implementation=TRIAL
            )
            model.tie_weights()
    except Exception as error:  # a class's own checks have no common base
        raise Unservable(f"cannot be built: {one_line(error)}") from error
    _keep_in_float32(model, dtype)
    with suppress(AttributeError, ValueError):  # it has no experts that could be set
        model.set_experts_implementation(EXPERTS)
    return model.eval()


def _experts(
    module: nn.Module, hidden: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """By grouped products, which wait for nothing; in the trial only their shape."""
    if hidden.device == META:
        return torch.empty_like(hidden)
    out: torch.Tensor = grouped_mm_experts_forward(module, hidden, expert_ids, gates)
    return out


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


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


def _settle_rope(model: nn.Module, max_model_len: int) -> None:
    """RoPE that depends on a sequence's length, which differs in a packed row, must not."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in set(kinds.values() if isinstance(kinds, dict) else [kinds]) - {None}:
            if kind == "longrope" and isinstance(kinds, str):
                most = module.config.rope_parameters["original_max_position_embeddings"]
                if max_model_len > most:
                    raise Unservable(
                        f"has rope_type 'longrope', which is exact up to {most} tokens: pass "
                        f"max_model_len {most}; a context of {max_model_len}"
                    )
                module.rope_type = "default"  # its frequencies are those of the short factors
            elif kind not in SERVED_ROPE_TYPES:
                raise Unservable(f"has rope_type {kind!r}")


def _try(model: Any, max_model_len: int) -> tuple[list[AttentionCall], Any, type]:
    """One pass on the meta device: the attention calls, the base model, its output's class."""
    trial = Trial(max_model_len)
    outputs: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        setattr(module, HANDLER, trial)
    hooks = [
        base.register_forward_hook(lambda module, _, output: outputs.append((module, output)))
        for base in _bases(model)
    ]
    tokens = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64, device=META)
    try:
        # Views of a mask name it as their base, but not in inference mode.
        with _buffers_on_meta(model), torch.inference_mode(False), torch.no_grad():
            model(input_ids=tokens, attention_mask=tokens + 1, position_ids=tokens, use_cache=False)
    except Unservable:
        raise
    except Exception as error:  # whatever its code cannot do there
        raise Unservable(f"cannot be tried: {type(error).__name__}: {one_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(trial.calls) != num_layers:
        raise Unservable(f"attends in {len(trial.calls)} of num_hidden_layers {num_layers}")
    if not outputs or getattr(outputs[-1][1], "last_hidden_state", None) is None:
        raise Unservable("does not get its hidden states from its base model")
    base, output = outputs[-1]  # the outermost ends last
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise Unservable(f"has a {type(base).__name__} that takes no position_ids")
    return trial.calls, base, type(output)


def _let_give(base: Any) -> None:
    """Let a base model return its attribute `given`, where there is one, instead of computing."""
    model_class = type(base)

    def forward(self: Any, *args: Any, **arguments: Any) -> Any:
        if self.given is not None:
            return self.given
        return model_class.forward(self, *args, **arguments)

    base.given = None
    # A subclass, as a function of this one module would keep the module that keeps it.
    base.__class__ = type(model_class.__name__, (model_class,), {"forward": forward})


def _bases(model: Any) -> list[nn.Module]:
    """The modules of which one gives the hidden states to the head."""
    named = (getattr(model, name, None) for name in {model.base_model_prefix, "model"})
    bases: list[Any] = [base for base in named if isinstance(base, nn.Module)]
    decoders = [
        base.decoder for base in bases if isinstance(getattr(base, "decoder", 0), nn.Module)
    ]
    return [*decoders, *bases]


@contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    for module, its in buffers:
        module._buffers.update({n: None if b is None else b.to(META) for n, b in its.items()})
    try:
        yield
    finally:
        for module, its in buffers:
            module._buffers.update(its)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters, shared where they are tied; buffers to the device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
