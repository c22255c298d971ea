"""LoRA adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.<module>.lora_A.weight [r, in]     <module> as in the base checkpoint
    base_model.model.<module>.lora_B.weight [out, r]

`read_adapter` checks an adapter against the base model's layers and lays it out as a slot of
`LoRALayers`, scaled and filled up to the largest rank. What is not served exactly is refused with
its name. A pickled adapter (.bin) is never opened, because reading one runs its code.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from asyncllm.errors import LoRALoadError
from asyncllm.models.layers.lora import LoRALayers

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERN_CHARS = 256
TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Matched against many names: a repeated group could take for ever.
REPEATED_GROUP = re.compile(r"\)[*+?{]")
READ_BYTES = 1 << 20


class PeftConfig(msgspec.Struct):
    """The part of peft's `LoraConfig` that decides what the tensors mean."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: bool = False
    use_bdlora: Any = None
    arrow_config: Any = None


# Settings under which the tensors mean more than a product of two matrices, and what is served.
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
}


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What is known of an adapter that was read. `content` is equal for equal files only."""

    content: bytes
    rank: int  # the largest of its modules
    modules: tuple[str, ...]


def read_adapter(folder: Path, layers: LoRALayers, slot: torch.Tensor) -> AdapterInfo:
    """Fill `slot` [elements], on the CPU and laid out as the slots of `layers`, with an adapter.

    Raises `LoRALoadError` naming file, tensor or setting, and the value; `slot` then holds
    anything.
    """
    config, config_bytes = _read_config(folder)
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            pairs = _pairs(file, opened.keys())
            slot.zero_()
            ranks = _fill(file, opened, pairs, config, layers, slot)
    except (SafetensorError, OSError) as error:
        raise LoRALoadError(f"{file}: {error}") from error
    return AdapterInfo(_hash(config_bytes, file), max(ranks), tuple(sorted(pairs)))


def _read_config(folder: Path) -> tuple[PeftConfig, bytes]:
    file = folder / CONFIG_FILE
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = (folder / PICKLED_FILE).is_file()
        why = f"only {PICKLED_FILE}, and pickled weights are never read" if pickled else "missing"
        raise LoRALoadError(f"{folder / WEIGHTS_FILE}: {why}")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise LoRALoadError(f"{file}: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise LoRALoadError(f"{file}: over {MAX_CONFIG_BYTES} bytes")
    try:
        config = msgspec.json.decode(text, type=PeftConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LoRALoadError(f"{file}: {error}") from error
    for name, served in PLAIN.items():
        value = getattr(config, name)
        if value != served and value not in ([], {}):
            raise LoRALoadError(f"{file}: {name} {value!r} is not supported, only {served!r}")
    if not (config.r > 0 and math.isfinite(config.lora_alpha)):
        raise LoRALoadError(f"{file}: r {config.r}, lora_alpha {config.lora_alpha}")
    return config, text


def _pairs(file: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Module -> "A" and "B" -> the tensor's name."""
    pairs: dict[str, dict[str, str]] = {}
    for name in names:
        found = TENSOR_NAME.fullmatch(name)
        if found is None:
            raise LoRALoadError(f"{file}: tensor {name} is none that is served (lora_A, lora_B)")
        pairs.setdefault(found[1], {})[found[2]] = name
    if not pairs:
        raise LoRALoadError(f"{file}: no tensors")
    for module, pair in pairs.items():
        if missing := {"A", "B"} - pair.keys():
            raise LoRALoadError(f"{file}: {module} has no lora_{missing.pop()}")
    return pairs


def _fill(
    file: Path,
    opened: Any,
    pairs: Mapping[str, Mapping[str, str]],
    config: PeftConfig,
    layers: LoRALayers,
    slot: torch.Tensor,
) -> list[int]:
    """Each module's two matrices to their places; returns the ranks."""
    views = [(a[0], b[0]) for a, b in layers.views(slot.unsqueeze(0))]
    places = {
        module: (a, b, place, features, layer.shape)
        for layer, (a, b) in zip(layers.layers, views, strict=True)
        for place, (module, features) in enumerate(layer.rows.items())
    }
    ranks = []
    for module, pair in pairs.items():
        rank = opened.get_slice(pair["A"]).get_shape()[0]
        ranks.append(rank)
        if module.startswith(layers.elsewhere):
            continue
        if module not in places:
            raise LoRALoadError(f"{file}: {pair['A']}: the model has no linear layer {module}")
        a, b, place, features, shape = places[module]
        _check(file, opened, pair["A"], [rank, shape.in_features])
        _check(file, opened, pair["B"], [shape.parts[module], rank])
        if not 0 < rank <= layers.max_rank:
            raise LoRALoadError(
                f"{file}: {pair['A']}: rank {rank} is over max_lora_rank {layers.max_rank}"
            )
        first = place * layers.max_rank
        columns = shape.shard.columns or slice(None)
        a[first : first + rank] = _finite(file, opened, pair["A"])[:, columns]
        whole = _finite(file, opened, pair["B"])
        own = torch.cat([whole[rows] for rows in shape.rows(module)])
        b[features, :rank] = own.float() * _scale(config, module, rank)
    return ranks


def _check(file: Path, opened: Any, name: str, wanted: list[int]) -> None:
    entry = opened.get_slice(name)
    if entry.get_shape() != wanted:
        raise LoRALoadError(
            f"{file}: {name} has shape {entry.get_shape()}, the model needs {wanted}"
        )
    if entry.get_dtype() not in ("F32", "F16", "BF16"):
        raise LoRALoadError(f"{file}: {name} has dtype {entry.get_dtype()}")


def _finite(file: Path, opened: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = opened.get_tensor(name)
    if not tensor.isfinite().all():
        raise LoRALoadError(f"{file}: {name} holds NaN or infinity")
    return tensor


def _scale(config: PeftConfig, module: str, rank: int) -> float:
    """What peft multiplies the product of the two matrices by."""
    alpha = _of_pattern(config.alpha_pattern, module, config.lora_alpha)
    wanted = _of_pattern(config.rank_pattern, module, config.r)
    if wanted != rank:
        raise LoRALoadError(f"{module}: rank {rank}, {CONFIG_FILE} says {wanted}")
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in patterns.items():
        if len(pattern) > MAX_PATTERN_CHARS or REPEATED_GROUP.search(pattern):
            raise LoRALoadError(f"{CONFIG_FILE}: pattern {pattern[:MAX_PATTERN_CHARS]!r}")
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise LoRALoadError(f"{CONFIG_FILE}: pattern {pattern!r}: {error}") from error
    return default


def _hash(config: bytes, file: Path) -> bytes:
    digest = hashlib.sha256(config)
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            digest.update(piece)
    return digest.digest()
