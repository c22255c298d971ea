"""A scheduler with empty pages, of the sizes that a worker's memory has."""

from __future__ import annotations

from asyncllm.config import EngineConfig
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.chunk_policy import ChunkPolicy
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.state_pool import StatePool
from asyncllm.engine.stats import SchedulerStats
from asyncllm.types import SwapCost
from asyncllm.worker.memory import MemoryPlan


def new_scheduler(
    config: EngineConfig,
    memory: MemoryPlan,
    chunk_policy: ChunkPolicy,
    swap_cost: SwapCost | None,
    totals: SchedulerStats,
) -> Scheduler:
    """totals: of the scheduler before, whose counts go on."""
    states = None
    if memory.has_states:
        states = StatePool(config.num_slots, memory.num_snapshots, memory.num_host_states)
    blocks = BlockManager(
        memory.num_pages,
        config.block_size,
        memory.num_host_pages,
        config.enable_prefix_caching,
        memory.groups,
        states,
    )
    return Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunk_policy=chunk_policy,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        swap_cost=swap_cost,
        totals=totals,
        num_sets=config.mesh.pp if config.async_scheduling else 1,
    )
