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

from asyncllm.graphs.captured_times import captured_seconds
from asyncllm.models.layers.cublas_lt import CublasLt
from asyncllm.models.layers.kept_choices import KeptChoices
from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.products import Products
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.worker.decode_rows import FillDecodes, fill_decodes_torch
from asyncllm.worker.executor import Executor, StreamExecutor, ThreadExecutor
from asyncllm.worker.sampler import SampleSlots, sample_slots_torch
from asyncllm.worker.slot_changes import WriteSlots, write_slots_torch
from asyncllm.worker.slot_rows import GatherSlots, gather_slots_torch
from asyncllm.worker.token_masks import ApplyMasks, apply_masks_torch

logger = logging.getLogger("asyncllm")


@dataclass(frozen=True, slots=True)
class SlotKernels:
    """What is done to slots around the model's forward pass."""

    gather_slots: GatherSlots
    fill_decodes: FillDecodes
    write_slots: WriteSlots
    sample_slots: SampleSlots
    apply_masks: ApplyMasks


def select_slot_kernels(device: torch.device) -> SlotKernels:
    """Triton's on CUDA, else plain torch."""
    if device.type != "cuda":
        return SlotKernels(
            gather_slots_torch,
            fill_decodes_torch,
            write_slots_torch,
            sample_slots_torch,
            apply_masks_torch,
        )
    # Slow to import: only where they are used.
    from asyncllm.worker.decode_rows_kernel import fill_decodes_triton
    from asyncllm.worker.mask_kernel import apply_masks_triton
    from asyncllm.worker.sampling_kernels import sample_slots_triton
    from asyncllm.worker.slot_changes_kernel import write_slots_triton
    from asyncllm.worker.slot_rows_kernel import gather_slots_triton

    return SlotKernels(
        gather_slots_triton,
        fill_decodes_triton,
        write_slots_triton,
        sample_slots_triton,
        apply_masks_triton,
    )


def has_fast_ops(device: torch.device, dtype: torch.dtype) -> bool:
    """Ours: on CUDA in half precision, where FlashInfer is installed; without it torch does all."""
    is_half = device.type == "cuda" and dtype != torch.float32
    return is_half and importlib.util.find_spec("flashinfer") is not None


def select_ops(device: torch.device, dtype: torch.dtype, sizes: Collection[int]) -> Ops:
    """`sizes`: tokens of the steps whose products are worth a choice."""
    if not has_fast_ops(device, dtype):
        return TorchOps()
    from asyncllm.models.layers.cuda_ops import CudaOps  # slow to import: Triton

    library = _open_library(device, dtype, sizes)
    if library is None:
        return CudaOps(device)
    # How it is timed is part of it: what starts kept that launched one by one is not taken over.
    key = (torch.cuda.get_device_name(device), library.version, dtype, "in graphs")
    return CudaOps(device, Products(library, sizes, KeptChoices(*key), captured_seconds))


def _open_library(
    device: torch.device, dtype: torch.dtype, sizes: Collection[int]
) -> CublasLt | None:
    """None, for torch's own products, where nothing is captured or there is none to choose with."""
    if not sizes:
        return None
    try:
        return CublasLt(dtype, device)
    except (OSError, RuntimeError) as error:
        logger.info("products are left to torch: %s", error)
        return None


def make_executor(device: torch.device) -> Executor:
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()
