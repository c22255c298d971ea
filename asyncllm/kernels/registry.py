"""Every hand-written kernel that a start compiles or launches before it has weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from asyncllm.kernels import balanced_decode, nvcc, persistent_decode, prefill_lists, skinny_gemm
from asyncllm.kernels.declaration import Start

CUDA_KERNELS = (
    skinny_gemm.KERNEL,
    balanced_decode.KERNEL,
    prefill_lists.KERNEL,
    persistent_decode.KERNEL,
)
# Triton compiles a variant at its first launch. `prewarm(start)` of these folders' kernel.py yields
# launches, on tensors that nobody reads, of the variants that steps will ask for. The others are
# launched by the padding steps of a start.
PREWARMED = ("gemv", "sampling", "slots", "rms_norm", "rope_kv_write", "latent_attention")


def libraries(start: Start) -> list[nvcc.Library]:
    """Everything that nvcc has to compile for a start. Without a compiler only what is there
    already: a start falls back for the rest."""
    asked = [(kernel, kernel.definitions(start)) for kernel in CUDA_KERNELS]
    found = [kernel.library(start.device, each) for kernel, each in asked if each is not None]
    if nvcc.find_compiler() is None:
        return [library for library in found if library.is_built]
    return found


def prewarm_launches(start: Start) -> Iterator[Callable[[], object]]:
    """Each has Triton compile one variant. Imports Triton, which is slow."""
    for name in PREWARMED:
        yield from import_module(f"asyncllm.kernels.{name}.kernel").prewarm(start)
