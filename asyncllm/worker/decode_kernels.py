"""The ways to run a decode step among which a start measures: see graphs/decode_ways.py.

Only for captured steps, and only where the attention backend was left to us: who names one gets its
kernels in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncllm.attention.cuda_source import Launch
from asyncllm.attention.kv_cache import KVCache
from asyncllm.config import EngineConfig
from asyncllm.graphs.decode_ways import Way
from asyncllm.models import persistent_decode
from asyncllm.models.base import CausalLM
from asyncllm.models.persistent_decode import MAX_ROWS, PersistentDecode
from asyncllm.worker.model_runner import ModelRunner

ONE_KERNEL = "one kernel"


def is_measured(config: EngineConfig) -> bool:
    """Whether a start under this configuration chooses."""
    is_ours = config.attention_backend == "auto" and not config.enforce_eager
    return is_ours and config.cuda_graph_sizes[0] <= MAX_ROWS


def begin_loading(
    config: EngineConfig, model: CausalLM, device: torch.device
) -> Callable[[], Launch | None]:
    """What `other_ways` needs, by a thread from now on; the weights may still be missing."""
    if not is_measured(config):
        return lambda: None
    return persistent_decode.begin_loading(model, config.block_size, device)


def other_ways(
    runner: ModelRunner, model: CausalLM, cache: KVCache, loading: Callable[[], Launch | None]
) -> list[Way]:
    """Besides the layers. Waits for the compiler where it has not come to its end."""
    launch = loading()
    if launch is None:
        return []
    num_blocks = persistent_decode.num_blocks_on(cache.layers[0].device)
    one_kernel = PersistentDecode(model, cache, launch, num_blocks)
    step = partial(runner.decode_step, forward=one_kernel.forward)
    return [Way(ONE_KERNEL, step, range(1, MAX_ROWS + 1))]
