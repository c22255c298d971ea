"""Checks of the configuration keys that native families depend on.

Every error names config.json, the key and its value.
"""

from __future__ import annotations

import math
import re
from typing import Any

from asyncllm.errors import ModelLoadError, UnsupportedModelError
from asyncllm.gguf_file import LINK
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.models.layers.ops import SILU, Activation
from asyncllm.models.layers.rotary import HeadOrder
from asyncllm.models.loader import stored_names

FIRST_STAGE = ("model.embed_tokens.", "model.norm.", "lm_head.")  # tensors it has besides layers
LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.")
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": Activation("gelu_tanh")}


def unsupported(config: ModelConfig, key: str, reason: str) -> UnsupportedModelError:
    """The error for a key that transformers' code may serve; `reason` continues after its value."""
    return UnsupportedModelError(_text(config, key, reason))


def _invalid(config: ModelConfig, key: str, reason: str) -> ModelLoadError:
    """The same for a value that no code can compute with."""
    return ModelLoadError(_text(config, key, reason))


def _text(config: ModelConfig, key: str, reason: str) -> str:
    value = getattr(config.hf_config, key, None)
    return f"{config.path / 'config.json'}: {key} {value!r} {reason}"


def require(config: ModelConfig, **values: tuple[Any, ...]) -> None:
    """Each key has one of these values. Raises `ModelLoadError`."""
    for key, allowed in values.items():
        if getattr(config.hf_config, key, None) not in allowed:
            words = " or ".join(map(repr, allowed))
            raise unsupported(config, key, f"is not supported, only {words}")


def positive(config: ModelConfig, key: str, at_most: str | None = None) -> int:
    """A key that must be a positive integer, at most another key's. Raises `ModelLoadError`."""
    value = getattr(config.hf_config, key, None)
    if type(value) is not int or value < 1:
        raise unsupported(config, key, "must be a positive integer")
    if at_most is not None and value > (most := positive(config, at_most)):
        raise unsupported(config, key, f"is more than {at_most} {most}")
    return value


def positive_number(config: ModelConfig, key: str) -> float:
    """A key that must be a positive, finite number. Raises `ModelLoadError`."""
    value: Any = getattr(config.hf_config, key)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _invalid(config, key, "must be a positive number")
    return float(value)


def activation_of(config: ModelConfig) -> Activation:
    """The feed-forward's activation. Raises `ModelLoadError`."""
    hf = config.hf_config
    key = "hidden_act" if getattr(hf, "hidden_activation", None) is None else "hidden_activation"
    if (found := ACTIVATIONS.get(getattr(hf, key))) is None:
        words = ", ".join(map(repr, ACTIVATIONS))
        raise unsupported(config, key, f"is not supported, only {words}")
    return found


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Each layer's window by `layer_types`; without that key, one window for all layers."""
    hf = config.hf_config
    if getattr(hf, "layer_types", None) is None:
        return (one_window(config),) * config.num_layers
    kinds = {"full_attention", "sliding_attention"}
    if not {*hf.layer_types} <= kinds or len(hf.layer_types) != config.num_layers:
        reason = f"must be {config.num_layers} of {', '.join(sorted(kinds))}"
        raise unsupported(config, "layer_types", reason)
    if "sliding_attention" not in hf.layer_types:
        return (None,) * config.num_layers
    if (window := one_window(config)) is None:
        raise unsupported(config, "sliding_window", "must be set: layer_types asks for it")
    return tuple(window if each == "sliding_attention" else None for each in hf.layer_types)


def one_window(config: ModelConfig) -> int | None:
    """`sliding_window`, which may be None. Raises `ModelLoadError`."""
    window: Any = getattr(config.hf_config, "sliding_window", None)
    if window is not None and (type(window) is not int or window < 1):
        raise _invalid(config, "sliding_window", "must be a positive integer or null")
    return window


def head_order(config: ModelConfig, interleaved: bool = False) -> HeadOrder | None:
    """The order of head entries for partial or interleaved RoPE; None for plain NeoX RoPE."""
    factor = (config.hf_config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    rotary_dim = int(config.head_dim * factor) if isinstance(factor, float | int) else 0
    if not 0 < rotary_dim <= config.head_dim or rotary_dim % 2 or config.head_dim % 2:
        raise unsupported(config, "rope_parameters", f"rotates no part of {config.head_dim}")
    if rotary_dim == config.head_dim and not interleaved:
        return None
    return HeadOrder(config.head_dim, rotary_dim, interleaved)


def unused_names(config: ModelConfig, mesh: MeshConfig) -> dict[str, None]:
    """The tensors of other pipeline stages, and of multi-token-prediction layers after the last."""
    key = "num_nextn_predict_layers"
    num_drafts: Any = getattr(config.hf_config, key, None)
    if num_drafts is not None and (type(num_drafts) is not int or num_drafts < 0):
        raise _invalid(config, key, "must be an integer, 0 or more")
    known, own = range(config.num_layers + (num_drafts or 0)), mesh.layers(config.num_layers)
    if known == own:  # all that there are; a GGUF header takes long to read
        return {}

    def is_unused(name: str) -> bool:
        if (found := LAYER_NAME.match(name)) is None:
            return mesh.stage > 0 and name.startswith(FIRST_STAGE)
        return int(found[1]) in known and int(found[1]) not in own

    return dict.fromkeys(filter(is_unused, stored_names(config.path)))


def check_num_tensors(config: ModelConfig) -> None:
    """Raise `ModelLoadError` for more layers than the checkpoint has tensors, whatever their names:
    building them one by one would exhaust memory."""
    num_tensors = len(stored_names(config.path))
    if 0 < num_tensors < config.num_layers:
        reason = f"is more than the {num_tensors} tensors of the checkpoint"
        raise _invalid(config, "num_hidden_layers", reason)


def check_decoder(config: ModelConfig) -> None:
    """The checks that all families need. Raises `ModelLoadError`."""
    hf = config.hf_config
    if hf.num_attention_heads % config.num_kv_heads:
        reason = f"is no multiple of {config.num_kv_heads} key-value heads"
        raise _invalid(config, "num_attention_heads", reason)
    if (config.path / LINK).is_file():  # a GGUF header takes long to read
        return
    found = map(LAYER_NAME.match, stored_names(config.path))
    num_stored = 1 + max((int(name[1]) for name in found if name), default=-1)
    if 0 < num_stored < config.num_layers:  # building them would exhaust memory
        reason = f"is more than the {num_stored} of the checkpoint"
        raise _invalid(config, "num_hidden_layers", reason)
