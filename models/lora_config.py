"""`adapter_config.json`, as peft writes it: the part that decides what an adapter's tensors mean.

What is not served exactly is refused with its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.errors import LoRALoadError
from asyncllm.lora import CONFIG_FILE
from asyncllm.models.name_pattern import name_pattern

MAX_CONFIG_BYTES = 1 << 20


class PeftConfig(msgspec.Struct):
    """The fields of peft's `LoraConfig` that count, besides SERVED. The tensors say which modules
    are adapted."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_dora: bool = False
    init_lora_weights: Any = True

    def scale(self, module: str, rank: int) -> float:
        """The factor by which peft multiplies the product of a module's two matrices."""
        alpha = _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        wanted = _of_pattern(self.rank_pattern, module, self.r)
        if wanted != rank:
            raise LoRALoadError(f"{module}: rank {rank}, {CONFIG_FILE} says {wanted}")
        return float(alpha / math.sqrt(rank) if self.use_rslora else alpha / rank)


# Beginnings of a training that take the matrices out of the base: they are for what is left of it.
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings under which the tensors mean more than what their names say, and what is served: the
# default first.
SERVED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", "all", "lora_only"),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, {}),
    "arrow_config": (None, {}),
    "layer_replication": (None, []),
    "velora_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
}


def read_config(folder: Path) -> tuple[PeftConfig, bytes]:
    """The settings and the file they came from. Raises `LoRALoadError`."""
    file = folder / CONFIG_FILE
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise LoRALoadError(f"{file}: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise LoRALoadError(f"{file}: over {MAX_CONFIG_BYTES} bytes")
    try:
        content = msgspec.json.decode(text)
        config = msgspec.convert(content, PeftConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LoRALoadError(f"{file}: {error}") from error
    for name, served in SERVED.items():
        if (value := content.get(name, served[0])) not in served:
            wanted = ", ".join(repr(each) for each in served if each not in ([], {}))
            raise LoRALoadError(f"{file}: {name} {value!r} is not supported, only {wanted}")
    if str(config.init_lora_weights).lower().startswith(CHANGE_THE_BASE):
        raise LoRALoadError(
            f"{file}: init_lora_weights {config.init_lora_weights!r} is not supported, as its "
            "matrices are for a changed base: save with path_initial_model_for_weight_conversion"
        )
    if not (config.r > 0 and math.isfinite(config.lora_alpha)):
        raise LoRALoadError(f"{file}: r {config.r}, lora_alpha {config.lora_alpha}")
    return config, text


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in patterns.items():
        try:
            if name_pattern(rf"(.*\.)?({pattern})$").match(module):
                return value
        except ValueError as error:
            raise LoRALoadError(f"{CONFIG_FILE}: {error}") from error
    return default
