"""The implementations of a decode step among which a start measures: see graphs/decode_graphs.py.

Only for captured steps, and only where the attention backend was left to us.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.decode_graphs import DecodeKernel
from asyncllm.kernels import persistent_decode
from asyncllm.kernels.declaration import Launch, Start, num_sms
from asyncllm.kernels.persistent_decode import MAX_ROWS
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.persistent_decode import PersistentDecode
from asyncllm.worker.model_runner import ModelRunner

PERSISTENT = "persistent"


def begin_loading(start: Start) -> Callable[[], Launch | None]:
    """Load what `other_kernels` needs, by a thread; the weights may still be missing."""
    kernel = persistent_decode.KERNEL
    return kernel.begin_loading(start.device, kernel.definitions(start))


def other_kernels(
    runner: ModelRunner, model: CausalLM, cache: KVCache, loading: Callable[[], Launch | None]
) -> list[DecodeKernel]:
    """Besides the layers. Waits for the compiler where it has not come to its end."""
    launch = loading()
    if launch is None:
        return []
    assert isinstance(model, DenseDecoder)
    persistent = PersistentDecode(model, cache, launch, num_sms(cache.layers[0].device))
    step = partial(runner.decode_step, forward=persistent.forward)
    return [DecodeKernel(PERSISTENT, step, range(1, MAX_ROWS + 1))]
