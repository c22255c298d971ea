"""Our CUDA sources that a start of a model compiles, each for a card and for the model's shapes.

`kernels build` compiles them beforehand and a start begins with them before it reads weights; so
which they are follows from the configuration and a model without memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from asyncllm.attention import balanced_decode, cuda_source, prefill_lists
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.registry import resolve_backend
from asyncllm.config import EngineConfig
from asyncllm.models import persistent_decode
from asyncllm.models.base import CausalLM
from asyncllm.models.layers import few_rows, gated_product
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.registry import build_model
from asyncllm.worker.decode_choice import is_measured

ANY_LENGTH = 16  # of the context: no kernel knows it


@dataclass(frozen=True, slots=True)
class OwnKernel:
    """A library of ours, as `flashinfer_modules.Module` is one of FlashInfer's."""

    source: Path
    capability: tuple[int, int]
    definitions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self._library.stem

    @property
    def is_built(self) -> bool:
        """False also where our cache is not to be looked into: nothing can be loaded from there."""
        try:
            return self._library.exists()
        except (OSError, RuntimeError):  # not ours to look into, no home
            return False

    def build(self) -> OwnKernel:
        """Compile it; what the compiler has against it is a warning."""
        cuda_source.load(self.source, self.capability, self.definitions)
        return self

    @property
    def _library(self) -> Path:
        return cuda_source.path_of(self.source, self.capability, self.definitions)


def begin_building(config: EngineConfig, device: torch.device) -> None:
    """Have the compiler begin with what a start of this model will wait for, before it is built."""
    dtype, meta = getattr(torch, config.dtype), torch.device("meta")
    model = build_model(config.model, dtype, meta, TorchOps(), ANY_LENGTH)
    for kernel in own_kernels(config, model, device):
        cuda_source.begin_loading(kernel.source, kernel.capability, kernel.definitions)


def own_kernels(config: EngineConfig, model: CausalLM, device: torch.device) -> list[OwnKernel]:
    """What a start on this CUDA device loads. `model` may be without memory.

    Without a compiler only what is there already: a start does without the rest.
    """
    capability = torch.cuda.get_device_capability(device)
    found = _product_kernels(config, device)
    if resolve_backend(config.attention_backend, device) == "flashinfer":
        found += _attention_kernels(config, model, capability)
    if is_measured(config):
        flags = persistent_decode.flags_for(model, config.block_size, device)
        if flags is not None:
            found.append(OwnKernel(persistent_decode.SOURCE, capability, flags))
    if cuda_source.find_compiler() is None:
        return [kernel for kernel in found if kernel.is_built]
    return found


def _product_kernels(config: EngineConfig, device: torch.device) -> list[OwnKernel]:
    capability = torch.cuda.get_device_capability(device)
    found = [OwnKernel(few_rows.SOURCE, capability)] if few_rows.supports(device) else []
    is_chosen = not config.enforce_eager  # for captured steps
    if is_chosen and gated_product.supports(device, getattr(torch, config.dtype)):
        found.append(OwnKernel(gated_product.SOURCE, capability))
    return found


def _attention_kernels(
    config: EngineConfig, model: CausalLM, capability: tuple[int, int]
) -> list[OwnKernel]:
    layers = model.attention_layers
    cache = KVCache(
        num_layers=1,
        num_pages=1,
        block_size=config.block_size,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        dtype=getattr(torch, config.dtype),
        device=torch.device("meta"),
    )
    if capability not in balanced_decode.CAPABILITIES:
        return []
    if not all(balanced_decode.supports(layer, cache) for layer in layers):
        return []
    flags = balanced_decode.definitions(layers[0], config.block_size)
    found = [OwnKernel(balanced_decode.SOURCE, capability, flags)]
    is_captured = not config.enforce_eager and config.prefill_graph_sizes
    if is_captured and capability == prefill_lists.CAPABILITY:
        found.append(OwnKernel(prefill_lists.SOURCE, capability))
    return found
