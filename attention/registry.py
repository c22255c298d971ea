"""Which attention backend a configuration gets."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from asyncllm.attention.base import AttentionBackend, AttentionLayer
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.config import AttentionBackendName


def resolve_backend(name: AttentionBackendName, device: torch.device) -> AttentionBackendName:
    """`auto` settled: FlashInfer on CUDA where it is installed, else torch.

    Raises `ValueError` naming the flag where the backend cannot run here.
    """
    if name == "auto":
        usable = device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None
        return "flashinfer" if usable else "torch"
    if name != "torch":
        if device.type != "cuda":
            raise ValueError(f"attention_backend {name} needs a CUDA device")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"attention_backend {name}: the package is not installed")
    return name


def import_backend(name: AttentionBackendName) -> None:
    """Now, what `build_backend` would: it takes seconds, in which threads compile kernels."""
    if name != "torch":
        importlib.import_module(f"asyncllm.attention.{name}")


def build_backend(
    name: AttentionBackendName, cache: KVCache, layers: list[AttentionLayer]
) -> AttentionBackend:
    """The backend over `cache`; `name` as `resolve_backend` returned it."""
    # CUDA packages are optional and slow to import: only the one that is asked for is.
    if name == "flashinfer":
        from asyncllm.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(cache, layers)
    if name == "flash_attn":
        from asyncllm.attention.flash_attn import FlashAttnAttention

        return FlashAttnAttention(cache)
    return TorchAttention(cache)
