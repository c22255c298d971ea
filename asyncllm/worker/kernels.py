"""Chooses the implementations for a device, all in one place.

Other code of the worker asks for the device only because of memory: what is pinned, what is
measured, what has an event to wait for.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from asyncllm.attention.state_cache import StateBackend, StateCache, TorchStates
from asyncllm.config import EngineConfig
from asyncllm.graphs.captured_times import captured_seconds
from asyncllm.kernels.gemm.cublas_lt import CublasLt
from asyncllm.kernels.gemm.gemm_autotune import Agree, AutotunedGemm, GemmCache
from asyncllm.models.layers.lora_ops import TORCH_LORA, LoRAOps
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.models.parallel.stores import EngineStore
from asyncllm.worker.device_state import (
    DeviceState,
    FillDecodes,
    GatherSlots,
    fill_decodes_torch,
    gather_slots_torch,
)
from asyncllm.worker.executor import Executor, StreamExecutor, ThreadExecutor
from asyncllm.worker.sampler import SampleSlots, sample_slots_torch
from asyncllm.worker.slot_changes import WriteSlots, write_slots_torch
from asyncllm.worker.token_masks import RowMasks

logger = logging.getLogger("asyncllm")


@dataclass(frozen=True, slots=True)
class SlotKernels:
    """Kernels that read and write slots, before and after the model's forward pass."""

    gather_slots: GatherSlots
    fill_decodes: FillDecodes
    write_slots: WriteSlots
    sample_slots: SampleSlots


def select_slot_kernels(device: torch.device) -> SlotKernels:
    """Triton on CUDA, else torch."""
    if device.type != "cuda":
        return SlotKernels(
            gather_slots_torch, fill_decodes_torch, write_slots_torch, sample_slots_torch
        )
    # Slow to import.
    from asyncllm.kernels.sampling.kernel import sample_slots_triton
    from asyncllm.kernels.slots.kernel import (
        fill_decodes_triton,
        gather_slots_triton,
        write_slots_triton,
    )

    return SlotKernels(
        gather_slots_triton, fill_decodes_triton, write_slots_triton, sample_slots_triton
    )


def select_lora_ops(device: torch.device) -> LoRAOps:
    """Triton on CUDA, else torch."""
    if device.type != "cuda":
        return TORCH_LORA
    from asyncllm.kernels.lora import expand, replace, rows, shrink  # slow to import

    firsts = shrink.shrink, shrink.look_up
    return LoRAOps(rows.gather_rows, *firsts, replace.replace, expand.expand, expand.expand_swiglu)


def select_states(cache: StateCache, device: torch.device) -> StateBackend:
    """Triton on CUDA, else torch."""
    if device.type != "cuda":
        return TorchStates(cache)
    from asyncllm.attention.triton_states import TritonStates  # slow to import

    return TritonStates(cache)


def has_fast_ops(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels run: on CUDA in half precision, if FlashInfer is installed."""
    is_half = device.type == "cuda" and dtype != torch.float32
    return is_half and importlib.util.find_spec("flashinfer") is not None


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Collection[int],
    agree: Agree | None = None,
) -> Ops:
    """sizes: token counts of steps whose GEMMs are autotuned. agree: makes all ranks use the same
    choice."""
    if not has_fast_ops(device, dtype):
        return TorchOps()
    from asyncllm.models.layers.cuda_ops import CudaOps  # slow to import: Triton

    return CudaOps(device, _select_gemm(device, dtype, sizes, agree))


def _select_gemm(
    device: torch.device, dtype: torch.dtype, sizes: Collection[int], agree: Agree | None
) -> AutotunedGemm | None:
    """None for torch's cuBLAS: nothing is captured, or cuBLASLt cannot be loaded."""
    if not sizes:
        return None
    try:
        library = CublasLt(dtype, device)
    except (OSError, RuntimeError) as error:
        logger.info("falling back to torch's cuBLAS: %s", error)
        return None
    # The way of timing is part of the key: older caches timed single launches, not graphs.
    key = (torch.cuda.get_device_name(device), library.version, dtype, "in graphs")
    return AutotunedGemm(library, sizes, GemmCache(*key), captured_seconds, agree)


def make_executor(device: torch.device, rank: int = 0) -> Executor:
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor(inline=rank > 0)


def first_of_stage(mesh: Mesh, device: torch.device, ours: bytes) -> bytes:
    """The bytes of the stage's first rank, on all its ranks. Waits for the device."""
    numbers = torch.frombuffer(bytearray(ours), dtype=torch.uint8).to(device, torch.int32)
    if mesh.config.place > 0:
        numbers.zero_()
    return bytes(mesh.reduce(numbers).tolist())


def make_mesh(
    config: EngineConfig, store: Any, host: str, engines: EngineStore | None = None
) -> CollectiveMesh:
    """`host`: the address at which other ranks reach this one. engines: of those that share
    experts. Waits for all of them."""
    device = torch.device(config.device)
    row_size = None
    if has_fast_ops(device, getattr(torch, config.dtype)):
        row_size = getattr(config.model.hf_config, "hidden_size", None)
    of_engines = None if engines is None else engines.store
    return CollectiveMesh(config.mesh, store, host, device, row_size, of_engines)


def share_tokens(sample: SampleSlots, mesh: Mesh) -> SampleSlots:
    """With several tensor-parallel ranks, rank 0 samples and the others take its tokens."""
    if mesh.config.tp == 1:
        return sample

    def sample_shared(
        state: DeviceState,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        masks: RowMasks | None,
    ) -> torch.Tensor:
        if mesh.config.rank == 0:
            return mesh.broadcast(sample(state, logits, slots, positions, masks))
        tokens = mesh.broadcast(torch.empty_like(slots))
        state.advance(slots, tokens, state.positions[slots] if positions is None else positions)
        return tokens

    return sample_shared
