"""How many pages fit, their memory, how long a context may be, what moving a page costs.

On CUDA a profiling run of the largest step shows what activations need; what is left of the allowed
share is KV cache. On the CPU the KV cache gets a default share of the machine's memory, and no more
than all sequences could ever use.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from asyncllm.attention.base import AttentionLayer, AttentionMixer, RotatedHeads, Rotation
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.host_pages import HostPages
from asyncllm.attention.kv_cache import KVCache, KVScales
from asyncllm.cache_group import CacheGroup, num_blocks_that_fit, num_pages_for
from asyncllm.config import GIB, EngineConfig
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.models.kv_scales import measured_scales, stored_scales
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.types import SwapCost

CPU_KV_SHARE = 0.1  # of the machine's memory, where no flag says otherwise
TIMED_TOKENS_CPU = 64
FULL_SAMPLING_COPIES = 6  # of the logits in float32, at the same time: what `sample_fully` may hold
GRAPH_RESERVE_BYTES = GIB // 2  # captured graphs and their workspaces, activations apart


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_pages: int  # usable, the padding page not counted
    num_host_pages: int
    max_model_len: int
    groups: tuple[CacheGroup, ...]


def _profile_step(model: CausalLM, config: EngineConfig, device: torch.device) -> int:
    """Bytes that the largest step takes at most, by running it without its attention; 0 on a CPU,
    where none are set aside."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = forward_without_attention(model, config.max_num_batched_tokens, device)
    logits = model.compute_logits(hidden[: config.max_num_seqs])
    copies = logits.new_empty((FULL_SAMPLING_COPIES, *logits.shape), dtype=torch.float32)
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device) - before
    del hidden, logits, copies
    torch.cuda.empty_cache()
    return peak_bytes


def forward_without_attention(
    model: CausalLM, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """Hidden states [num_tokens, hidden_size] that mean nothing, by a whole step's work else."""
    tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    prompt_lens = tokens + 1 if model.uses_prompt_lens else None
    return model.forward(TokenInputs(tokens, tokens, prompt_lens), AttentionMixer(_no_attention))


def _no_attention(
    layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
) -> torch.Tensor:
    tokens = qkv.q if isinstance(qkv, RotatedHeads) else qkv
    return tokens.new_zeros((len(tokens), layer.num_heads * layer.head_dim))


def plan_memory(
    model: CausalLM, config: EngineConfig, layout: CacheLayout, device: torch.device, mesh: Mesh
) -> MemoryPlan:
    """Pages on the device and the host, and the context window that they allow: what the rank with
    the least memory has.

    Raises `ValueError` naming the flag where the asked window does not fit or nothing does.
    """
    page_bytes, peak_bytes = layout.page_bytes, _profile_step(model, config, device)
    model_len = config.max_model_len or config.model.context_window
    groups = layout.groups(config.max_num_batched_tokens)
    num_blocks = -(-model_len // config.block_size)
    most = config.max_num_seqs * num_pages_for(groups, num_blocks)
    num_pages = mesh.least(_num_pages(config, page_bytes, peak_bytes, device, most))
    fits = num_blocks_that_fit(groups, num_pages, num_blocks) * config.block_size
    if fits < 1:
        raise ValueError(
            f"{num_pages} KV pages of {page_bytes} bytes fit, and a block takes {len(groups)}: "
            f"raise gpu_memory_utilization ({config.gpu_memory_utilization}) or "
            "kv_cache_memory_bytes"
        )
    if config.max_model_len is not None and config.max_model_len > fits:
        raise ValueError(
            f"max_model_len {config.max_model_len} needs more KV cache than there is: {num_pages} "
            f"pages hold {fits} tokens; lower it, or raise gpu_memory_utilization or "
            "kv_cache_memory_bytes"
        )
    num_host_pages = mesh.least(config.swap_space_bytes // page_bytes)
    return MemoryPlan(num_pages, num_host_pages, min(model_len, fits), groups)


def _num_pages(
    config: EngineConfig, page_bytes: int, peak_bytes: int, device: torch.device, most: int
) -> int:
    """`most`: what all sequences could ever use."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // page_bytes - 1
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = total * config.gpu_memory_utilization - (total - free)
        reserve = GRAPH_RESERVE_BYTES
        if config.prefill_graph_sizes and not config.enforce_eager:
            # Of the largest captured step: graphs keep their activations apart from eager steps'.
            largest = config.prefill_graph_sizes[-1]
            reserve += peak_bytes * largest // config.max_num_batched_tokens
        return int(allowed - peak_bytes - reserve) // page_bytes - 1
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(ram * CPU_KV_SHARE / config.mesh.size) // page_bytes - 1, most)


def begin_host_pages(config: EngineConfig, layout: CacheLayout, device: torch.device) -> HostPages:
    """As many as `swap_space` holds; being allocated from here on."""
    num_pages = config.swap_space_bytes // layout.page_bytes
    return HostPages(layout.host_shape(num_pages), torch.int64, device)


def allocate_cache(
    layout: CacheLayout,
    num_pages: int,
    host_pages: HostPages,
    scales: KVScales | None,
    device: torch.device,
) -> KVCache:
    """The KV cache: `num_pages` and the padding page. Raises `ValueError` naming the flags where
    the memory is not there."""
    try:
        return KVCache(layout, num_pages + 1, device, host_pages, scales)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"no memory for {num_pages} KV pages: lower num_gpu_blocks_override, "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error


def kv_scales(model: CausalLM, config: EngineConfig, device: torch.device) -> KVScales | None:
    """The scales of an FP8 cache; None of another. Raises `ModelLoadError`."""
    if config.kv_cache_dtype == config.dtype:
        return None
    if config.calculate_kv_scales:
        if any(layer.latent_dim is not None for layer in model.attention_layers):
            raise ValueError("calculate_kv_scales is for keys and values, not for latents")
        model_len = config.max_model_len or config.model.context_window
        dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
        return measured_scales(model, config.model, dtype, model_len, device)
    return stored_scales(config.model, config.mesh.layers(config.model.num_layers))


def time_prefill_on_cpu(model: CausalLM, config: EngineConfig) -> float:
    """Seconds per token of a small step; the second of two, the first is warm-up."""
    num_tokens = min(config.max_num_batched_tokens, TIMED_TOKENS_CPU)
    for _ in range(2):
        start = time.perf_counter()
        forward_without_attention(model, num_tokens, torch.device("cpu"))
    return (time.perf_counter() - start) / num_tokens


def measure_swap_cost(
    cache: KVCache, memory: MemoryPlan, seconds_per_token: float
) -> SwapCost | None:
    """Time a round trip of the padding page; None where there are no host pages. Waits for them;
    raises `ValueError` naming the flag where they do not fit."""
    try:
        if cache.host.shape[0] == 0:
            return None
        for _ in range(2):  # the second is warm
            start = time.perf_counter()
            cache.swap_out([(0, 0)])
            cache.swap_in([(0, 0)])
            if cache.storages[0].device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        return SwapCost(seconds / 2, seconds_per_token)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"no memory for {memory.num_host_pages} swapped KV pages: lower swap_space"
        ) from error
