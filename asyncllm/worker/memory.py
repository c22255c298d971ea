"""Plans and allocates the KV cache and recurrent states; measures the cost of swapping.

On CUDA a profiling run of the largest step measures the activations; the rest of the allowed share
of memory is KV cache. On the CPU the KV cache gets a default share of the machine's memory, but not
more than all sequences could use. Recurrent states, one per slot, are allocated first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncllm.attention.base import AttentionLayer, RotatedHeads, Rotation, StepMixer
from asyncllm.attention.cache_spec import CacheLayout
from asyncllm.attention.host_pages import HostPages
from asyncllm.attention.kv_cache import KVCache, KVScales
from asyncllm.attention.recurrence import new_output
from asyncllm.attention.state_cache import StateCache, StateLayout
from asyncllm.cache_group import CacheGroup, num_blocks_that_fit, num_pages_for
from asyncllm.config import GIB, EngineConfig
from asyncllm.host import memory_bytes
from asyncllm.models.base import CausalLM, TokenInputs
from asyncllm.models.kv_scales import measured_scales, stored_scales
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.parallel.stages import Stages
from asyncllm.models.persistent_decode import shared_bytes
from asyncllm.step_plan import StateMoves
from asyncllm.types import SwapCost

SNAPSHOT_SHARE = 0.25  # the most of the memory besides the slots' states that snapshots take
SNAPSHOTS_PER_SLOT = 2  # at most: one of the prompt, one of its answer
CPU_KV_SHARE = 0.1  # default share of the machine's memory
TIMED_TOKENS_CPU = 64
FULL_SAMPLING_COPIES = 6  # float32 copies of the logits that `sample_fully` may hold at a time
GRAPH_RESERVE_BYTES = GIB // 2  # captured graphs and their workspaces, without activations


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_pages: int  # without the padding page
    num_host_pages: int
    max_model_len: int
    groups: tuple[CacheGroup, ...]
    num_snapshots: int = 0  # rows of the state memory after the slots'
    num_host_states: int = 0
    has_states: bool = False


def _profile_step(model: CausalLM, config: EngineConfig, device: torch.device) -> int:
    """Peak bytes of the largest step, measured by running it without attention; 0 on a CPU, where
    no memory is reserved for it."""
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
    """Run a step without attention. The hidden states [num_tokens, hidden_size] are meaningless."""
    tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    prompt_lens = tokens + 1 if model.uses_prompt_lens else None
    mixer = StepMixer(_no_attention, lambda layer, inputs: new_output(inputs).zero_())
    return model.forward(TokenInputs(tokens, tokens, prompt_lens), mixer)


def _no_attention(
    layer: AttentionLayer, qkv: torch.Tensor | RotatedHeads, rotation: Rotation | None
) -> torch.Tensor:
    tokens = qkv.q if isinstance(qkv, RotatedHeads) else qkv
    return tokens.new_zeros((len(tokens), layer.num_heads * layer.head_dim))


def plan_snapshots(config: EngineConfig, states: StateLayout, room: int) -> int:
    """The number of state snapshots, if pages and states have `room` bytes."""
    if not states.row_bytes or not config.enable_prefix_caching:
        return 0
    left = room - config.num_slots * states.row_bytes
    most = SNAPSHOTS_PER_SLOT * config.max_num_seqs
    return max(0, min(most, int(left * SNAPSHOT_SHARE) // states.row_bytes))


def plan_memory(
    model: CausalLM,
    config: EngineConfig,
    layout: CacheLayout,
    states: StateLayout,
    device: torch.device,
    mesh: Mesh,
) -> MemoryPlan:
    """The numbers of pages and states, and the context window that they allow, of the rank with the
    least memory.

    Raises `ValueError` naming the flag if the requested window, or a single block, does not fit.
    """
    page_bytes, peak_bytes = layout.page_bytes, _profile_step(model, config, device)
    room = _cache_bytes(config, peak_bytes, shared_bytes(model, mesh.config), device)
    num_snapshots = mesh.least(plan_snapshots(config, states, room))
    state_bytes = (config.num_slots + num_snapshots) * states.row_bytes
    if state_bytes > room and config.num_gpu_blocks_override is None:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} needs {state_bytes} bytes for the states of "
            f"recurrent layers, {states.row_bytes} each, and there are {room}: lower it, or raise "
            f"gpu_memory_utilization ({config.gpu_memory_utilization}) or kv_cache_memory_bytes"
        )
    model_len = config.max_model_len or config.model.context_window
    groups = layout.groups(config.max_num_batched_tokens)
    num_blocks = -(-model_len // config.block_size)
    most = config.max_num_seqs * num_pages_for(groups, num_blocks)
    num_pages = mesh.least(_num_pages(config, layout, room - state_bytes, most, device))
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
    num_host_states, num_host_pages = map(mesh.least, host_rows(config, layout, states))
    max_model_len = min(model_len, fits)
    return MemoryPlan(
        num_pages,
        num_host_pages,
        max_model_len,
        groups,
        num_snapshots,
        num_host_states,
        has_states=bool(states.layers),
    )


def _num_pages(
    config: EngineConfig, layout: CacheLayout, room: int, most: int, device: torch.device
) -> int:
    """most: pages that all sequences could use."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    num_pages = layout.num_pages_in(room) - 1
    is_asked = config.kv_cache_memory_bytes is not None or device.type == "cuda"
    return num_pages if is_asked and layout.page_bytes else min(num_pages, most)


def _cache_bytes(
    config: EngineConfig, peak_bytes: int, rank_bytes: int, device: torch.device
) -> int:
    """Bytes that pages and states may take. rank_bytes: those that ranks will share."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = total * config.gpu_memory_utilization - (total - free)
        reserve = GRAPH_RESERVE_BYTES + rank_bytes
        if config.prefill_graph_sizes and not config.enforce_eager:
            # Graphs have activations of their own, besides those of eager steps.
            largest = config.prefill_graph_sizes[-1]
            reserve += peak_bytes * largest // config.max_num_batched_tokens
        return int(allowed - peak_bytes - reserve)
    return int(memory_bytes() * CPU_KV_SHARE / config.mesh.size)


def host_rows(config: EngineConfig, layout: CacheLayout, states: StateLayout) -> tuple[int, int]:
    """The numbers of swapped states, in up to half of `swap_space`, and of swapped pages."""
    room, row_bytes = config.swap_space_bytes, states.row_bytes
    num_states = min(config.max_num_seqs, room // 2 // row_bytes) if row_bytes else 0
    left = room - num_states * row_bytes
    return num_states, layout.num_pages_in(left) if left else 0


def allocate_cache(
    layout: CacheLayout,
    num_pages: int,
    host_pages: HostPages,
    scales: KVScales | None,
    device: torch.device,
) -> KVCache:
    """The KV cache with `num_pages` and the padding page. Raises `ValueError` naming the flags if
    there is not enough memory."""
    try:
        return KVCache(layout, num_pages + 1, device, host_pages, scales)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"no memory for {num_pages} KV pages: lower num_gpu_blocks_override, "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        ) from error


def allocate_states(
    layout: StateLayout, num_slots: int, memory: MemoryPlan, device: torch.device
) -> StateCache | None:
    """None without recurrent layers. Raises `ValueError` as `allocate_cache`."""
    if not layout.layers:
        return None
    num_rows = num_slots + memory.num_snapshots
    try:
        return StateCache(layout, num_rows, device, memory.num_host_states)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"no memory for {num_rows} states of {layout.row_bytes} bytes: lower max_num_seqs"
        ) from error


def kv_scales(
    model: CausalLM, config: EngineConfig, device: torch.device, stages: Stages | None
) -> KVScales | None:
    """The scales of an FP8 KV cache; None for other dtypes. Raises `ModelLoadError`."""
    if config.kv_cache_dtype == config.dtype:
        return None
    if config.calculate_kv_scales:
        if any(layer.latent_dim is not None for layer in model.attention_layers):
            raise ValueError("calculate_kv_scales is for keys and values, not for latents")
        model_len = config.max_model_len or config.model.context_window
        dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
        return measured_scales(model, config.model, dtype, model_len, device, stages)
    return stored_scales(config.model, config.mesh.layers(config.model.num_layers))


def time_prefill_on_cpu(model: CausalLM, config: EngineConfig) -> float:
    """Seconds per token of a small step, after a warm-up."""
    num_tokens = min(config.max_num_batched_tokens, TIMED_TOKENS_CPU)
    for _ in range(2):
        start = time.perf_counter()
        forward_without_attention(model, num_tokens, torch.device("cpu"))
    return (time.perf_counter() - start) / num_tokens


def measure_swap_cost(
    cache: KVCache, states: StateCache | None, memory: MemoryPlan, seconds_per_token: float
) -> SwapCost | None:
    """Time a round trip of the padding page and of the padding slot's state. None without host
    pages. Waits for their allocation; raises `ValueError` naming the flag if it fails."""

    def move_page() -> None:
        cache.swap_out([(0, 0)])
        cache.swap_in([(0, 0)])

    def move_state() -> None:
        if states is not None and memory.num_host_states:
            states.before_step(StateMoves(swap_out=((0, 0),), swap_in=((0, 0),)))

    try:
        if cache.host.shape[0] == 0:
            return None
        page, state = (_seconds(move, cache.device) / 2 for move in (move_page, move_state))
        return SwapCost(page, seconds_per_token, state)
    except (MemoryError, RuntimeError) as error:
        raise ValueError(
            f"no memory for {memory.num_host_pages} swapped KV pages: lower swap_space"
        ) from error


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of `work`, after a warm-up."""
    for _ in range(2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds


def free_memory(device: str) -> None:
    """Free what cycles keep, which would be freed later, and give torch's cache back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
