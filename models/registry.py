"""The builder of each architecture that `ModelConfig` lets through."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.llama import build_llama
from asyncllm.models.mistral import build_mistral
from asyncllm.models.quantization.select import linear_methods
from asyncllm.models.qwen2 import build_qwen2
from asyncllm.models.qwen3 import build_qwen3

ARCHITECTURES: dict[str, Callable[[ModelConfig, Build], CausalLM]] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
}


def build_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    max_model_len: int,
    lora: LoRALayers | None = None,
) -> CausalLM:
    """The model with its weights allocated and uninitialised: `load_weights` fills them.

    Raises `ModelLoadError` naming config.json and the architecture or key that is not supported.
    """
    methods = linear_methods(model_config, dtype, device, ops)
    build = Build(dtype, device, ops, methods, max_model_len, lora)
    if model_config.implementation == "transformers":
        # All of the library's model code: seconds.
        from asyncllm.models.transformers_backend import TransformersModel

        return TransformersModel(model_config, build)
    try:
        return ARCHITECTURES[model_config.architecture](model_config, build)
    except AttributeError as error:  # a model_type whose configuration lacks what this one needs
        model_type = model_config.hf_config.model_type
        raise ModelLoadError(
            f"{model_config.path / 'config.json'}: model_type {model_type!r} does not fit "
            f"{model_config.architecture}: {error}"
        ) from error


def model_without_memory(
    model_config: ModelConfig, dtype: torch.dtype, max_model_len: int
) -> CausalLM:
    """For what is to be known before there are weights. Raises as `build_model`."""
    return build_model(model_config, dtype, torch.device("meta"), TorchOps(), max_model_len)
