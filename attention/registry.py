"""Selects the attention backend of a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import logging

import torch

from asyncllm.attention.backend import AttentionBackend, NoAttention
from asyncllm.attention.base import AttentionLayer
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.config import AttentionBackendName

logger = logging.getLogger("asyncllm")

# Backends of optional packages, which are slow to import: only the selected one is imported.
MODULES = {
    "flashinfer": "asyncllm.attention.flashinfer.backend",
    "flash_attn": "asyncllm.attention.flash_attn",
}
FP8_CAPABILITY = (8, 9)  # has instructions to convert FP8


def resolve_backend(
    name: AttentionBackendName, device: torch.device, is_fp8: bool = False
) -> AttentionBackendName:
    """Resolve `auto`: FlashInfer on CUDA, if it is installed and the device can convert an FP8 KV
    cache, else torch.

    Raises `ValueError` naming the flag if the backend cannot run here.
    """
    if is_fp8 and name == "flash_attn":
        raise ValueError(f"attention_backend {name} has no FP8 KV cache: pass auto")
    if name == "auto":
        usable = device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None
        if usable and is_fp8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            logger.warning("falling back to attention_backend torch, for an FP8 KV cache: slow")
            usable = False
        return "flashinfer" if usable else "torch"
    if name != "torch":
        if device.type != "cuda":
            raise ValueError(f"attention_backend {name} needs a CUDA device")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"attention_backend {name}: the package is not installed")
    return name


def import_backend(name: AttentionBackendName, *, or_torch: bool = False) -> AttentionBackendName:
    """Import what `build_backend` needs, which takes seconds, while threads compile kernels.

    Returns the imported backend. If the import fails, raises `ValueError` naming the flag, or with
    `or_torch` logs a warning and returns torch.
    """
    try:
        if name != "torch":
            importlib.import_module(MODULES[name])
    except ImportError as error:
        if not or_torch:
            raise ValueError(f"attention_backend {name}: {error}") from error
        logger.warning("falling back to attention_backend torch: %s", error)
        return "torch"
    return name


def build_backend(
    name: AttentionBackendName,
    cache: KVCache,
    layers: list[AttentionLayer],
    dtype: torch.dtype,
) -> AttentionBackend:
    """The backend for `cache`. name: as returned by `resolve_backend`. dtype: of queries.

    Raises `ValueError` if the layers have features that the backend does not support.
    """
    if not layers and name != "torch":
        return NoAttention(cache)
    for layer in layers if name == "flash_attn" else ():
        features = {
            "latents": layer.latent_dim,
            "sinks": layer.sinks,
            "slopes (ALiBi)": layer.slopes,
            "a soft cap": layer.soft_cap,
        }
        for feature, value in features.items():
            if value is not None:
                raise ValueError(
                    f"attention_backend flash_attn does not do {feature}, which layer "
                    f"{layer.index} has: pass auto"
                )
    if name == "flashinfer" and all(layer.latent_dim is not None for layer in layers):
        if cache.is_fp8:
            raise ValueError(
                f"kv_cache_dtype {cache.layers[0].dtype}: attention_backend flashinfer has no FP8 "
                "latents (MLA): pass auto, or attention_backend torch"
            )
        from asyncllm.attention.latent import LatentPages  # imports Triton

        return LatentPages(cache)
    if name == "flashinfer":
        from asyncllm.attention.flashinfer.backend import FlashInferAttention

        return FlashInferAttention(cache, layers, dtype)
    if name == "flash_attn":
        from asyncllm.attention.flash_attn import FlashAttnAttention

        return FlashAttnAttention(cache)
    return TorchAttention(cache)
