"""Builds transformers models without weights, and allocates their parameters.

Parameters are on the meta device. Buffers are computed, as only the class knows how.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from asyncllm.errors import one_line
from asyncllm.model_config import ModelConfig
from asyncllm.models.layers.build import Build
from asyncllm.models.transformers_attention import TRIAL, Unservable
from asyncllm.models.transformers_experts import replace_experts
from asyncllm.models.transformers_indexed import SEEN, check_index, leave_out_index
from asyncllm.models.transformers_legacy import LEGACY, check_legacy, replace_attention
from asyncllm.models.transformers_states import RECURRENT_TYPES

META = torch.device("meta")
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *SEEN}


def without_weights(config: ModelConfig, build: Build) -> Any:
    """The model, with buffers on the CPU and parameters on the meta device."""
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
        text.use_bidirectional_attention = None  # it concerns images, which are not supported
    try:
        with no_init_weights(), _parameters_on_meta():
            model = model_class._from_config(
                config.hf_config, dtype=dtype, attn_implementation="eager" if is_legacy else TRIAL
            )
            model.tie_weights()
    except Exception as error:  # classes may raise anything
        raise Unservable(f"cannot be built: {one_line(error)}") from error
    if is_legacy:
        replace_attention(model)
    _keep_in_float32(model, dtype)
    replace_experts(model, build.ops)
    leave_out_index(model)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread registers go to the meta device; buffers do not.

    torch's meta device as a context would affect buffers, too. Modules that the application builds
    in other threads are not affected.
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
    """Keep parameters in float32 that the class lists: always, or with float16."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if kept & {*module_name.split("."), *name.split(".")}:
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate all parameters on the meta device, tied ones once, and move other tensors."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device == META:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = made[id(parameter)]
        for owner in tensors_of(module):
            owner.update({n: t.to(device) for n, t in owner.items() if isinstance(t, torch.Tensor)})


def tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, vars(module)
