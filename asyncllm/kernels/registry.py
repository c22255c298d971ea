"""Every hand-written kernel, by its declaration, and what a start does about all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncllm.kernels import balanced_decode, nvcc, persistent_decode, prefill_lists, skinny_gemm
from asyncllm.kernels.declaration import CudaKernel, Start, TritonKernel

KERNELS: tuple[CudaKernel | TritonKernel, ...] = (
    TritonKernel("sampling"),
    TritonKernel("slots"),
    skinny_gemm.KERNEL,
    balanced_decode.KERNEL,
    prefill_lists.KERNEL,
    persistent_decode.KERNEL,
    TritonKernel("rms_norm"),
    TritonKernel("rope_kv_write"),
    TritonKernel("gemv", is_prewarmed=False),
    TritonKernel("fused_decode", is_prewarmed=False),
    TritonKernel("paged_decode", is_prewarmed=False),
)


def libraries(start: Start) -> list[nvcc.Library]:
    """Everything that nvcc has to compile for a start. Without a compiler only what is there
    already: a start falls back for the rest."""
    of_kernels = (kernel.library(start) for kernel in KERNELS if isinstance(kernel, CudaKernel))
    found = [library for library in of_kernels if library is not None]
    if nvcc.find_compiler() is None:
        return [library for library in found if library.is_built]
    return found


def prewarm_launches(start: Start) -> Iterator[Callable[[], object]]:
    """Each has Triton compile one variant. Imports Triton."""
    for kernel in KERNELS:
        if isinstance(kernel, TritonKernel):
            yield from kernel.prewarm(start)
