"""The implementations that a device gets: the one place below the engine that asks which it is."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from asyncllm.models.layers.ops import Ops
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.worker.decode_ends import DecodeEnds, TorchDecodeEnds
from asyncllm.worker.executor import Executor, StreamExecutor, ThreadExecutor
from asyncllm.worker.sampler import (
    PlainSample,
    SampleSlots,
    TopKTopP,
    plain_sample_torch,
    sample_slots_torch,
    top_k_top_p_torch,
)
from asyncllm.worker.token_masks import ApplyMasks, apply_masks_torch


@dataclass(frozen=True, slots=True)
class Kernels:
    ops: Ops
    plain_sample: PlainSample
    sample_slots: SampleSlots
    top_k_top_p: TopKTopP
    decode_ends: DecodeEnds
    apply_masks: ApplyMasks


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """FlashInfer and Triton kernels on CUDA in half precision, plain torch elsewhere."""
    fast = device.type == "cuda" and dtype != torch.float32
    if not fast or importlib.util.find_spec("flashinfer") is None:
        return Kernels(
            TorchOps(),
            plain_sample_torch,
            sample_slots_torch,
            top_k_top_p_torch,
            TorchDecodeEnds(),
            apply_masks_torch,
        )
    # Optional packages, slow to import: only where they are used.
    from asyncllm.models.layers.flashinfer_ops import FlashInferOps
    from asyncllm.worker.decode_kernels import TritonDecodeEnds
    from asyncllm.worker.mask_kernel import apply_masks_triton
    from asyncllm.worker.sampling_kernels import (
        plain_sample_triton,
        sample_slots_triton,
        top_k_top_p_flashinfer,
    )

    return Kernels(
        FlashInferOps(device),
        plain_sample_triton,
        sample_slots_triton,
        top_k_top_p_flashinfer,
        TritonDecodeEnds(),
        apply_masks_triton,
    )


def make_executor(device: torch.device) -> Executor:
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()
