"""Compiles and launches kernels before the first request, so that no request waits for them.

nvcc compiles our CUDA sources in the background. Triton compiles a kernel at its first launch, for
about a second, or finds it in its cache, mostly without the GIL. So threads launch the kernels that
steps will launch, a variant per thread, on tensors that are not used otherwise, while FlashInfer is
imported and weights load. A launch's variant depends on the types and sizes of its tensors, so the
launches here run the same code as those of steps.

Before its first kernel Triton hashes its own libraries, 300 MB and more, in pieces between which it
takes the GIL, and each thread that comes meanwhile does so again. So one thread does it first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch

from asyncllm.attention.registry import resolve_backend
from asyncllm.config import EngineConfig
from asyncllm.graphs.token_buffers import TokenBuffers
from asyncllm.kernels import registry
from asyncllm.kernels.declaration import DenseShape, Start
from asyncllm.kernels.triton_key import hash_compiler
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.one_row_ops import OneRowOps, WithoutLookups
from asyncllm.models.parallel.mesh import Alone
from asyncllm.models.persistent_decode import weight_format
from asyncllm.models.quantization.select import is_quantized
from asyncllm.models.registry import keeps_latents, model_without_memory
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.kernels import SlotKernels, has_fast_ops
from asyncllm.worker.memory import forward_without_attention
from asyncllm.worker.packed_step import NO_FEATURE
from asyncllm.worker.sampler import sample_fully
from asyncllm.worker.slot_changes import RECORD_WORDS
from asyncllm.worker.token_masks import TokenMaskBuffer

MAX_THREADS = 8  # each launch takes a second or two of one core
ANY_LENGTH = 16  # a context length; no kernel that is compiled early depends on it


def early_start(config: EngineConfig, device: torch.device) -> Start:
    """The `Start` before the model is built, from a model on the meta device."""
    dtype, mesh = getattr(torch, config.dtype), Alone(config.mesh)
    latents = keeps_latents(config, _backend(config, device))
    shape = config.model, dtype, ANY_LENGTH, latents, mesh
    if not has_fast_ops(device, dtype) or config.model.implementation != "asyncllm":
        return start_of(config, model_without_memory(*shape), device)
    ops = OneRowOps()
    model = model_without_memory(*shape, ops)
    # Quantised weights use other kernels. What other models do between their GEMMs would import
    # torch's compiler; `load_model` runs these with one row instead.
    is_dense = model.full_read_tokens == 1 and not is_quantized(config.model)
    if is_dense and isinstance(model, DenseDecoder) and model.is_plain:
        if config.mesh.stage > 0:
            model.make_room(1)  # for hidden states of the previous stage
        with WithoutLookups():
            model.compute_logits(forward_without_attention(model, 1, torch.device("meta")))
    return replace(start_of(config, model, device), row_products=ops.products)


def start_of(config: EngineConfig, model: CausalLM, device: torch.device) -> Start:
    dtype = getattr(torch, config.dtype)
    is_captured = not config.enforce_eager
    # An explicit backend is used in all steps.
    is_free = is_captured and config.attention_backend == "auto"
    return Start(
        device=device,
        dtype=dtype,
        kv_dtype=getattr(torch, config.kv_cache_dtype),
        block_size=config.block_size,
        layers=model.attention_layers,
        sizes=DenseShape.of(config.model),
        dense_weights=weight_format(model) if config.mesh.only_divides_layers else None,
        attention_backend=_backend(config, device),
        has_fast_ops=has_fast_ops(device, dtype),
        captures_prefills=is_captured and bool(config.prefill_graph_sizes),
        free_decode_sizes=config.cuda_graph_sizes if is_free else (),
        new_state=lambda num_pages, vocab_size: DeviceState(1, num_pages, vocab_size, device),
        num_ranks=config.mesh.tp,
    )


def _backend(config: EngineConfig, device: torch.device) -> str:
    is_fp8 = config.kv_cache_dtype != config.dtype
    return resolve_backend(config.attention_backend, device, is_fp8=is_fp8)


class KernelPrewarm:
    """Launches kernels in threads. On a CPU, where nothing is compiled, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="asyncllm-prewarm")
        self._launches: list[Future[None]] = []

    def begin_all(self, config: EngineConfig) -> None:
        """Launch all kernels whose declarations say that this configuration uses them."""
        if self._device.type != "cuda":
            return
        start = early_start(config, self._device)
        if start.has_fast_ops:
            for library in registry.libraries(start):
                library.begin_loading()
        for launch in registry.prewarm_launches(start):
            self.begin(launch)

    def begin(self, launch: Callable[[], object], stream: torch.cuda.Stream | None = None) -> None:
        """Call `launch` in a thread, on this stream or the default one."""
        if self._device.type != "cuda":
            return
        self._launches.append(self._threads.submit(_run, launch, stream))

    def wait_for_hash(self) -> None:
        """Wait for the hash, so that launches of the calling thread need not compute it."""
        if self._device.type == "cuda":
            hash_compiler()

    def begin_last(self, launch: Callable[[], object]) -> None:
        """As `begin`, but after all launches begun so far, so that no kernel that they share is
        compiled twice."""
        before = list(self._launches)

        def launch_last() -> None:
            wait(before)  # cannot deadlock: they were submitted earlier
            launch()

        self.begin(launch_last)

    def settle(self) -> None:
        """Wait for all launches begun so far. Raises what the first one raised."""
        wait(self._launches)
        for launch in self._launches:
            launch.result()

    def wait(self) -> None:
        """`settle`, and end the threads."""
        self._threads.shutdown()
        self.settle()


def _run(launch: Callable[[], object], stream: torch.cuda.Stream | None) -> None:
    hash_compiler()
    with torch.inference_mode(), torch.cuda.stream(stream):
        launch()


def prewarm_slots(
    state: DeviceState,
    kernels: SlotKernels,
    masks: TokenMaskBuffer,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Launch the slot kernels on the padding slot, and the variants of sampling that padding steps
    do not launch, on the current stream. dtype: of the model's logits.

    A variant that is launched neither here nor by `ModelRunner.run_padding` or a capture is
    compiled while a request waits.
    """
    zero = torch.zeros(1, dtype=torch.int32, device=state.positions.device)
    record = torch.zeros(1, RECORD_WORDS, dtype=torch.int32, device=zero.device)
    kernels.write_slots(state, record, zero.expand(3, 1).contiguous())
    # The width of block tables is part of the kernel's variant.
    tokens = TokenBuffers(
        zero, zero, zero, zero.long().expand(len(state.block_tables), 1), zero, zero
    )
    kernels.fill_decodes(state, zero, tokens, block_size)
    masks.host()[:1] = -1
    row_masks = masks.upload(np.zeros(1, np.int32), 1)
    logits = torch.zeros(1, state.in_prompt.shape[1], dtype=dtype, device=zero.device)
    for positions in (zero, None):  # as after prefills, as after a decode step
        kernels.sample_slots(state, logits, zero, positions, row_masks)
        for each in (row_masks, None):
            sample_fully(
                kernels.sample_slots, state, logits, zero, positions, NO_FEATURE, None, each
            )
