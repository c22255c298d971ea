"""The builder of each architecture that `ModelConfig` lets through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from asyncllm.attention.registry import resolve_backend
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError, UnsupportedModelError
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.cohere import build_cohere
from asyncllm.models.deepseek import build_deepseek_v2, build_deepseek_v3
from asyncllm.models.dense import (
    build_granite,
    build_llama,
    build_mistral,
    build_phi3,
    build_qwen2,
    build_qwen3,
)
from asyncllm.models.gemma import build_gemma
from asyncllm.models.glm4 import build_glm4, build_glm4_moe
from asyncllm.models.gpt_oss import build_gpt_oss
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.moe import build_mixtral, build_olmoe, build_qwen2_moe, build_qwen3_moe
from asyncllm.models.olmo import build_olmo2, build_olmo3
from asyncllm.models.parallel.mesh import ALONE, Alone, Mesh
from asyncllm.models.persistent_decode import weight_format
from asyncllm.models.quantization.select import select_methods
from asyncllm.models.supported import check_num_tensors

logger = logging.getLogger("asyncllm")

ARCHITECTURES: dict[str, Callable[[ModelConfig, Build], CausalLM]] = {
    "Cohere2ForCausalLM": build_cohere,
    "CohereForCausalLM": build_cohere,
    "DeepseekV2ForCausalLM": build_deepseek_v2,
    "DeepseekV3ForCausalLM": build_deepseek_v3,
    "Gemma2ForCausalLM": build_gemma,
    "Gemma3ForCausalLM": build_gemma,
    "Glm4ForCausalLM": build_glm4,
    "Glm4MoeForCausalLM": build_glm4_moe,
    "GptOssForCausalLM": build_gpt_oss,
    "GraniteForCausalLM": build_granite,
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "MixtralForCausalLM": build_mixtral,
    "Olmo2ForCausalLM": build_olmo2,
    "Olmo3ForCausalLM": build_olmo3,
    "OlmoeForCausalLM": build_olmoe,
    "Phi3ForCausalLM": build_phi3,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen2MoeForCausalLM": build_qwen2_moe,
    "Qwen3ForCausalLM": build_qwen3,
    "Qwen3MoeForCausalLM": build_qwen3_moe,
}


def build_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    max_model_len: int,
    lora: LoRALayers | None = None,
    keeps_latents: bool = False,
    mesh: Mesh = ALONE,
) -> CausalLM:
    """The model with its weights allocated and uninitialised: `load_weights` fills them. Of ranks
    that share it each has its part.

    Raises `ModelLoadError` naming config.json and the architecture or key that is not supported.
    """
    methods = select_methods(model_config, dtype, device, ops, mesh.config)
    build = Build(
        *(dtype, device, ops, methods.linear, max_model_len, lora, keeps_latents, mesh),
        quantized_experts=methods.experts,
    )
    if model_config.implementation == "transformers":
        _check_ranks(model_config, mesh.config)
        check_num_tensors(model_config)
        # All of the library's model code: seconds.
        from asyncllm.models.transformers_backend import TransformersModel

        return TransformersModel(model_config, build)
    file, architecture = model_config.path / "config.json", model_config.architecture
    try:
        model = ARCHITECTURES[architecture](model_config, build)
    except AttributeError as error:  # a model_type whose configuration lacks what this one needs
        model_type = model_config.hf_config.model_type
        raise ModelLoadError(
            f"{file}: model_type {model_type!r} does not fit {architecture}: {error}"
        ) from error
    except NotImplementedError as error:  # of a method of a layer's weights
        raise UnsupportedModelError(f"{file}: {architecture} does not do {error}") from error
    if methods.schemes and device.type != "meta":
        logger.info(methods.describe())
        if device.type == "cuda" and weight_format(model) is None:
            logger.info("persistent decode does not take this model in these weights")
    return model


def _check_ranks(model_config: ModelConfig, mesh: MeshConfig) -> None:
    """Raise `ModelLoadError` but for tensor parallel plans, which transformers' code has."""
    for flag, is_used in (
        (f"pipeline_parallel_size {mesh.pp}", mesh.pp > 1),
        ("enable_expert_parallel", mesh.by_expert),
    ):
        if is_used:
            raise ModelLoadError(
                f"{flag}: {model_config.architecture} is run by transformers' code, which ranks "
                "share by tensor_parallel_size alone"
            )


def settle(config: EngineConfig) -> tuple[EngineConfig, CausalLM]:
    """With the implementation that serves its model exactly; and that model without memory.

    What a native family does not serve is left to transformers, unless ours was asked for. Raises
    as `build_model`.
    """
    backend = resolve_backend(config.attention_backend, torch.device(config.device))
    dtype, latents = getattr(torch, config.dtype), keeps_latents(config, backend)
    model_len = config.max_model_len or config.model.context_window
    mesh = Alone(config.mesh)
    try:
        return config, model_without_memory(config.model, dtype, model_len, latents, mesh)
    except UnsupportedModelError as error:
        if config.model.asked_implementation != "auto":
            raise
        logger.info("falling back to transformers' model: %s", error)
        other = ModelConfig.from_folder(config.model.path, "transformers")
        config = replace(config, model=replace(other, fallback=str(error)))
    return config, model_without_memory(config.model, dtype, model_len, mesh=mesh)


def keeps_latents(config: EngineConfig, backend: str) -> bool:
    """Whether attention takes latents: torch's does, and a kernel of ours on CUDA. With adapters
    keys and values are made, as an adapter may change how. backend: as `resolve_backend` says."""
    return backend in ("torch", "flashinfer") and not config.enable_lora


def model_without_memory(
    model_config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    keeps_latents: bool = False,
    mesh: Mesh = ALONE,
    ops: Ops | None = None,
) -> CausalLM:
    """For what is to be known before there are weights. Raises as `build_model`."""
    meta, ops = torch.device("meta"), ops or TorchOps()
    return build_model(model_config, dtype, meta, ops, max_model_len, None, keeps_latents, mesh)
