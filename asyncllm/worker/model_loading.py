"""Builds a worker's model, with memory for weights and adapters, and loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.registry import resolve_backend
from asyncllm.config import EngineConfig
from asyncllm.gguf_file import LINK
from asyncllm.hub.files import missing_parts
from asyncllm.kernels import persistent_decode
from asyncllm.kernels.declaration import Launch
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.kv_scales import MEASURED_TOKENS
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.layers.ops import Ops
from asyncllm.models.loader import load_weights
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.parallel.stages import Stages
from asyncllm.models.registry import build_model, keeps_latents, settle
from asyncllm.worker.kernel_prewarm import KernelPrewarm, start_of
from asyncllm.worker.kernels import select_lora_ops
from asyncllm.worker.memory import forward_without_attention


def make_model(
    config: EngineConfig, ops: Ops, mesh: Mesh, device: torch.device
) -> tuple[CausalLM, LoRALayers | None, Stages | None]:
    """The model without loaded weights, its LoRA layers, if adapters are enabled, and the transfers
    between stages, if there are several.

    Raises `ModelLoadError`, also for missing files, before it allocates memory.
    """
    folder = config.model.path
    is_read = config.load_format != "dummy" and not (folder / LINK).is_file()
    if is_read and missing_parts(folder, ["weights"]):
        Checkpoint(folder)  # raises
    dtype = getattr(torch, config.dtype)
    lora = None
    if config.enable_lora:
        lora_ops = select_lora_ops(device)
        room, whole = (config.max_loras, config.max_lora_rank), config.lora_modules_to_save
        lora = LoRALayers(*room, dtype, device, lora_ops, whole, mesh.config)
    model_len = config.max_model_len or config.model.context_window
    backend = resolve_backend(config.attention_backend, device)
    latents = keeps_latents(config, backend)  # as in the cache layout
    model = build_model(config.model, dtype, device, ops, model_len, lora, latents, mesh)
    if lora is not None:
        if not lora.layers:
            raise ValueError("enable_lora: this model's own code takes no adapters")
        own = config.mesh.layers(config.model.num_layers)
        others = {*range(config.model.num_layers)} - {*own}
        ends = ("model.embed_tokens", "lm_head") if config.mesh.stage > 0 else ()
        lora.elsewhere = *(f"model.layers.{index}." for index in others), *ends
        lora.allocate()
    stages = None
    if config.mesh.pp > 1:
        assert isinstance(model, DenseDecoder)  # `settle` has checked it
        sizes = *config.prefill_graph_sizes, *config.cuda_graph_sizes
        most = max(config.max_num_batched_tokens, config.num_slots, MEASURED_TOKENS, *sizes)
        stages = Stages(model, mesh, most)
    return model, lora, stages


def load_model(
    model: CausalLM,
    config: EngineConfig,
    prewarm: KernelPrewarm,
    device: torch.device,
    progress: bool,
) -> Callable[[], Launch | None]:
    """Load the weights, and compile kernels meanwhile. Returns a function that waits for the
    compilation of the persistent kernel."""
    # A step of one row has other GEMM kernels. It does not need the weights' values.
    if config.mesh.is_alone:  # with several ranks it would call the mesh from another thread
        prewarm.begin_last(
            lambda: model.compute_logits(forward_without_attention(model, 1, device))
        )
    definitions = persistent_decode.KERNEL.definitions(start_of(config, model, device))
    loading = persistent_decode.KERNEL.begin_loading(device, definitions)
    load_weights(model, config.model.path, config.load_format, config.seed, progress)
    return loading


def check_stages(config: EngineConfig, kv_dtype: torch.dtype) -> None:
    """Rank 0 plans pages for all stages, so they must have the same cache groups. Raises
    `ValueError` for a model with several groups."""
    _, model = settle(replace(config, mesh=MeshConfig()))
    layout = CacheLayout(model.attention_layers, config.block_size, kv_dtype)
    if layout.num_groups > 1:
        raise ValueError(
            f"pipeline_parallel_size {config.mesh.pp}: {config.model.architecture} has layers of "
            f"{layout.num_groups} cache groups, and stages must have one"
        )
