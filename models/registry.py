"""Builds the model of a configuration: a native family, or transformers' own code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch

from asyncllm.attention.registry import resolve_backend
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError, UnsupportedModelError
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ARCHITECTURES, ModelConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DecoderSpec, DenseDecoder
from asyncllm.models.layers.build import Build
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.parallel.mesh import ALONE, Alone, Mesh
from asyncllm.models.persistent_decode import weight_format
from asyncllm.models.quantization.select import select_methods
from asyncllm.models.supported import check_num_tensors

logger = logging.getLogger("asyncllm")


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
    """The model with its weights allocated and uninitialised: `load_weights` fills them. Each rank
    of several builds its own shard.

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
        # Imports all of the library's model code, which takes seconds.
        from asyncllm.models.transformers_backend import TransformersModel

        return TransformersModel(model_config, build)
    file, architecture = model_config.path / "config.json", model_config.architecture
    try:
        model = DenseDecoder(model_config, decoder_spec(model_config, build), build)
    except AttributeError as error:  # a model_type whose configuration lacks what this one needs
        model_type = model_config.hf_config.model_type
        raise ModelLoadError(
            f"{file}: model_type {model_type!r} does not fit {architecture}: {error}"
        ) from error
    except NotImplementedError as error:  # raised by a quantization method
        raise UnsupportedModelError(f"{file}: {architecture} does not do {error}") from error
    if methods.schemes and device.type != "meta":
        logger.info(methods.describe())
        if device.type == "cuda" and weight_format(model) is None:
            logger.info("persistent decode does not take this model in these weights")
    return model


def decoder_spec(config: ModelConfig, build: Build) -> DecoderSpec:
    """The differences of a native family, by the function that its module has for it."""
    module, function = ARCHITECTURES[config.architecture]
    make: Callable[..., DecoderSpec] = getattr(import_module(f"asyncllm.models.{module}"), function)
    return make(config, build)


def _check_ranks(model_config: ModelConfig, mesh: MeshConfig) -> None:
    """transformers' code has tensor-parallel plans alone. Raises `ModelLoadError` for others."""
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
    """The configuration with the implementation that serves its model, and that model without
    memory.

    A model that our family does not serve exactly is left to transformers, unless ours was asked
    for, or `--quantization`. Raises as `build_model`.
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
        if config.model.quantization is not None:
            raise ModelLoadError(f"quantization {config.model.quantization}: {error}") from error
        logger.info("falling back to transformers' model: %s", error)
        other = ModelConfig.from_folder(config.model.path, "transformers")
        config = replace(config, model=replace(other, fallback=str(error)))
    return config, model_without_memory(config.model, dtype, model_len, mesh=mesh)


def keeps_latents(config: EngineConfig, backend: str) -> bool:
    """Whether the pages of an MLA model hold latents. With adapters they hold keys and values,
    whose projections an adapter may change. backend: as `resolve_backend` returns it."""
    return backend in ("torch", "flashinfer") and not config.enable_lora


def model_without_memory(
    model_config: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    keeps_latents: bool = False,
    mesh: Mesh = ALONE,
    ops: Ops | None = None,
) -> CausalLM:
    """A model on the meta device: layers and shapes without weights. Raises as `build_model`."""
    meta, ops = torch.device("meta"), ops or TorchOps()
    return build_model(model_config, dtype, meta, ops, max_model_len, None, keeps_latents, mesh)
