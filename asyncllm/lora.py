"""`LoRARequest`, by which an application names an adapter. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# An adapter's files, as peft names them.
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Adapters of the built-in model, by name instead of a folder.
BUILTIN_ADAPTERS = {"tiny-pirate": Path(__file__).parent / "assets" / "tiny-pirate"}


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, with vLLM's name and order of fields.

    `lora_name` identifies an adapter. `lora_int_id` is accepted for compatibility and ignored.
    `lora_path` is a folder with adapter_config.json and adapter_model.safetensors, or the name of a
    built-in adapter.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | Path = ""
    base_model_name: str | None = None

    @property
    def folder(self) -> Path:
        return BUILTIN_ADAPTERS.get(str(self.lora_path), Path(self.lora_path))
