"""Adapters of transformers' model code: hooks on the linear layers and embeddings that it calls.

Which those are a trial shows: modules that were given one row for each token, by their names in the
class, which are those of peft. What a class computes past its modules (its experts, say) has none,
and an adapter of it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from asyncllm.models.layers.linear_method import WHOLE, LinearShape, Shard
from asyncllm.models.layers.lora import LoRALayer, LoRALayers
from asyncllm.models.layers.lora_embedding import LoRAEmbedding
from asyncllm.models.transformers_modules import FUSED
from asyncllm.models.transformers_shards import ON_RANK, Shards


@contextmanager
def noting_modules(model: nn.Module, num_tokens: int) -> Iterator[dict[str, nn.Module]]:
    """Name -> module, of those that were called meanwhile with a row for each of the tokens."""
    noted: dict[str, nn.Module] = {}
    hooks = []
    for name, module in model.named_modules():
        # A subclass of an embedding may scale what it gives.
        if isinstance(module, nn.Linear | Conv1D) or type(module) is nn.Embedding:

            def note(module: nn.Module, given: Any, _: Any, name: str = name) -> None:
                if given and given[0].shape[:2] == (1, num_tokens):
                    noted[name] = module

            hooks.append(module.register_forward_hook(note))
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def adapt(modules: Mapping[str, nn.Module], lora: LoRALayers, shards: Shards) -> None:
    """Once their parameters have memory."""
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            weight = module.weight
            tokens = slice(0, len(weight))
            embedding = LoRAEmbedding(lora, name, len(weight), weight, tokens, scale=1.0)
            module.register_forward_hook(_adding_vectors(lora.register(embedding)))
            continue
        layer = _layer(name, module, lora, shards)
        if hasattr(module, ON_RANK):  # between the product and the mesh
            setattr(module, FUSED, partial(_adapted, module, layer))
        else:
            module.register_forward_hook(_adding(layer))


def _layer(name: str, module: Any, lora: LoRALayers, shards: Shards) -> LoRALayer:
    is_conv, shard = isinstance(module, Conv1D), WHOLE
    if is_conv and lora.has_whole(name):
        raise ValueError(
            f"lora_modules_to_save: {name} lies transposed, no adapter may bring it whole"
        )
    sizes = (module.nx, module.nf) if is_conv else (module.in_features, module.out_features)
    own, has_bias = shards.parameters.get(f"{name}.weight"), module.bias is not None
    if own is not None:
        sizes = own.shape[1], own.shape[0]
        shard = Shard({name: own.ranges}) if own.dim == 0 else Shard(None, own.ranges[0], has_bias)
        has_bias |= f"{name}.bias" in shards.elsewhere
    layer = lora.layer(LinearShape({name: sizes[1]}, sizes[0], has_bias, shard))
    layer.base = {} if is_conv or own is not None else {"weight": module.weight}
    if module.bias is not None:
        layer.base = {**layer.base, "bias": module.bias}
    return layer


def _adapted(module: Any, layer: LoRALayer, x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, -2).contiguous()
    out = layer.add(F.linear(rows, module.weight, module.bias), rows)
    return out.unflatten(0, x.shape[:-1])


def _adding(layer: LoRALayer) -> Any:
    def add(_: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        x = given[0].flatten(0, 1).contiguous()  # a class may give a view, as of some columns
        return layer.add(out.flatten(0, 1), x).view(out.shape)

    return add


def _adding_vectors(embedding: LoRAEmbedding) -> Any:
    def add(_: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        ids = given[0].flatten()
        return embedding.add(embedding.replace(out.flatten(0, 1), ids), ids).view(out.shape)

    return add
