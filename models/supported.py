"""Refusals: a setting that a model file does not implement must end the start, never be ignored."""

from __future__ import annotations

from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig
from asyncllm.models.checkpoint import num_stored_layers


def unsupported(config: ModelConfig, key: str, reason: str) -> ModelLoadError:
    """The error for one key of config.json; `reason` continues after its value."""
    value = getattr(config.hf_config, key, None)
    return ModelLoadError(f"{config.path / 'config.json'}: {key} {value!r} {reason}")


def check_dense_decoder(config: ModelConfig) -> None:
    """All that the families of the dense decoder take for granted. Raises `ModelLoadError`."""
    hf = config.hf_config
    if hf.hidden_act != "silu":
        raise unsupported(config, "hidden_act", "is not supported, only 'silu'")
    if getattr(hf, "quantization_config", None) is not None:
        raise unsupported(config, "quantization_config", "is not supported")
    if hf.num_attention_heads % config.num_kv_heads:
        raise unsupported(
            config,
            "num_attention_heads",
            f"is no multiple of {config.num_kv_heads} key-value heads",
        )
    num_stored = num_stored_layers(config.path)  # before layers are built until memory ends
    if num_stored and config.num_layers > num_stored:
        raise unsupported(
            config, "num_hidden_layers", f"is more than the {num_stored} of the checkpoint"
        )
