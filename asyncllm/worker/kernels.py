"""The implementations that a device gets, all chosen here.

What else in these rooms asks for the device asks about memory: what is pinned, what is measured,
what has an event to wait for.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from asyncllm.attention.state_cache import StateBackend, StateCache, TorchStates
from asyncllm.graphs.captured_times import captured_seconds
from asyncllm.kernels.gemm.cublas_lt import CublasLt
from asyncllm.kernels.gemm.gemm_autotune import Agree, AutotunedGemm, GemmCache
from asyncllm.models.layers.lora_ops import TORCH_LORA, LoRAOps
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.parallel.mesh import Mesh
from asyncllm.worker.device_state import (
    DeviceState,
    FillDecodes,
    GatherSlots,
    fill_decodes_torch,
    gather_slots_torch,
)
from asyncllm.worker.executor import Executor, InlineExecutor, StreamExecutor, ThreadExecutor
from asyncllm.worker.sampler import SampleSlots, sample_slots_torch
from asyncllm.worker.slot_changes import WriteSlots, write_slots_torch
from asyncllm.worker.token_masks import RowMasks

logger = logging.getLogger("asyncllm")


@dataclass(frozen=True, slots=True)
class SlotKernels:
    """Operations on slots around the model's forward pass."""

    gather_slots: GatherSlots
    fill_decodes: FillDecodes
    write_slots: WriteSlots
    sample_slots: SampleSlots


def select_slot_kernels(device: torch.device) -> SlotKernels:
    """Triton's on CUDA, else plain torch."""
    if device.type != "cuda":
        return SlotKernels(
            gather_slots_torch, fill_decodes_torch, write_slots_torch, sample_slots_torch
        )
    # Slow to import: only where they are used.
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
    """Triton's on CUDA, else plain torch."""
    if device.type != "cuda":
        return TORCH_LORA
    from asyncllm.kernels.lora import expand, replace, rows, shrink  # slow to import

    firsts = shrink.shrink, shrink.look_up
    return LoRAOps(rows.gather_rows, *firsts, replace.replace, expand.expand, expand.expand_swiglu)


def select_states(cache: StateCache, device: torch.device) -> StateBackend:
    """Triton's on CUDA, else plain torch."""
    if device.type != "cuda":
        return TorchStates(cache)
    from asyncllm.attention.triton_states import TritonStates  # slow to import

    return TritonStates(cache)


def has_fast_ops(device: torch.device, dtype: torch.dtype) -> bool:
    """Ours: on CUDA in half precision, where FlashInfer is installed; without it torch does all."""
    is_half = device.type == "cuda" and dtype != torch.float32
    return is_half and importlib.util.find_spec("flashinfer") is not None


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Collection[int],
    agree: Agree | None = None,
) -> Ops:
    """`sizes`: tokens of the steps whose GEMMs are worth a choice, on which ranks `agree`."""
    if not has_fast_ops(device, dtype):
        return TorchOps()
    from asyncllm.models.layers.cuda_ops import CudaOps  # slow to import: Triton

    return CudaOps(device, _select_gemm(device, dtype, sizes, agree))


def _select_gemm(
    device: torch.device, dtype: torch.dtype, sizes: Collection[int], agree: Agree | None
) -> AutotunedGemm | None:
    """None, for torch's own, where nothing is captured or there is no library to choose with."""
    if not sizes:
        return None
    try:
        library = CublasLt(dtype, device)
    except (OSError, RuntimeError) as error:
        logger.info("falling back to torch's cuBLAS: %s", error)
        return None
    # How it is timed is part of it: what starts kept that launched one by one is not taken over.
    key = (torch.cuda.get_device_name(device), library.version, dtype, "in graphs")
    return AutotunedGemm(library, sizes, GemmCache(*key), captured_seconds, agree)


def make_executor(device: torch.device, rank: int = 0) -> Executor:
    if device.type == "cuda":
        return StreamExecutor(device)
    return ThreadExecutor() if rank == 0 else InlineExecutor()


def first_of_stage(mesh: Mesh, device: torch.device, ours: bytes) -> bytes:
    """The bytes that the stage's first rank gives; each gives as many. Waits for the device."""
    numbers = torch.frombuffer(bytearray(ours), dtype=torch.uint8).to(device, torch.int32)
    if mesh.config.place > 0:
        numbers.zero_()
    return bytes(mesh.reduce(numbers).tolist())


def share_tokens(sample: SampleSlots, mesh: Mesh) -> SampleSlots:
    """Rank 0 samples, and the slots of all ranks of its stage move on to its tokens; one rank's is
    as it was."""
    if mesh.config.tp == 1:
        return sample

    def sample_and_tell(
        state: DeviceState,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        masks: RowMasks | None,
    ) -> torch.Tensor:
        return mesh.broadcast(sample(state, logits, slots, positions, masks))

    def take(
        state: DeviceState,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        masks: RowMasks | None,
    ) -> torch.Tensor:
        tokens = mesh.broadcast(torch.empty_like(slots))
        state.advance(slots, tokens, state.positions[slots] if positions is None else positions)
        return tokens

    return sample_and_tell if mesh.config.rank == 0 else take
