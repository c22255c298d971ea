"""Selects the method of each linear layer, by the checkpoint or by `--quantization`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.models.checkpoint import Checkpoint, list_keys
from asyncllm.models.layers.experts_method import ExpertsMethod, ExpertsShape
from asyncllm.models.layers.linear_method import LinearMethod, UnquantizedLinearMethod
from asyncllm.models.layers.ops import Ops
from asyncllm.models.loader import DTYPES
from asyncllm.models.quantization.bitsandbytes_files import bitsandbytes
from asyncllm.models.quantization.compressed_files import compressed_tensors
from asyncllm.models.quantization.cpu_experts import CpuExperts
from asyncllm.models.quantization.cpu_kernel import CpuQuantKernel
from asyncllm.models.quantization.experts import (
    ExpertsKernel,
    FamilyLoads,
    QuantizedExpertsMethod,
)
from asyncllm.models.quantization.file_config import Keys, quantization_keys
from asyncllm.models.quantization.fp8_files import ReaderOf, fp8, modelopt
from asyncllm.models.quantization.method import QuantizedLinearMethod, QuantKernel, Reader
from asyncllm.models.quantization.mxfp4_files import mxfp4
from asyncllm.models.quantization.online import online
from asyncllm.models.quantization.packed_files import auto_round, awq, gptq
from asyncllm.models.quantization.sources import Header

FORMATS: dict[str, Callable[[Keys, Header], ReaderOf]] = {
    "fp8": fp8,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
}


class Methods(NamedTuple):
    """linear: a layer's name in the checkpoint -> its method. experts: name and shape of a layer's
    experts -> their method, or None if they are in 16 bits. schemes, left: all schemes that were
    requested, and the names of layers without one."""

    linear: Callable[[str], LinearMethod]
    experts: Callable[[str, ExpertsShape], ExpertsMethod | None] | None
    schemes: set[str]
    left: set[str]

    def describe(self) -> str:
        """A log message of what is quantised, and what is not."""
        rest = f", {len(self.left)} layers: {list_keys(self.left)}" if self.left else ""
        return (
            f"weights are quantised: {', '.join(sorted(self.schemes))}; in 16 bits: embeddings, "
            f"LM head, norms, routers{rest}"
        )


def select_methods(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops, mesh: MeshConfig
) -> Methods:
    """mesh: the ranks that divide experts. Raises `ModelLoadError` for unsupported settings."""
    plain = UnquantizedLinearMethod(dtype, device, ops)
    reader_of = _reader_of(config)
    if reader_of is None:
        return Methods(lambda name: plain, None, set(), set())
    kernel, experts_kernel = select_kernels(device, dtype)

    @cache
    def linear(reader: Reader) -> LinearMethod:
        return QuantizedLinearMethod(reader, kernel, dtype, device)

    schemes: set[str] = set()
    left: set[str] = set()

    def note(name: str, reader: Reader | None) -> Reader | None:
        if reader is None:
            left.add(name)
        else:
            schemes.add(str(reader.scheme))
        return reader

    def method_of(name: str) -> LinearMethod:
        reader = note(name, reader_of(name))
        return plain if reader is None else linear(reader)

    @cache
    def experts(reader: Reader) -> ExpertsMethod:
        return QuantizedExpertsMethod(reader, experts_kernel, dtype, device, mesh)

    def experts_of(name: str, shape: ExpertsShape) -> ExpertsMethod | None:
        readers = {reader_of(layer) for layer in FamilyLoads.of(name, shape, dtype).layers}
        if len(readers) > 1:
            raise ModelLoadError(f"{name}: these experts are not quantised alike")
        reader = note(name, readers.pop())
        return None if reader is None else experts(reader)

    return Methods(method_of, experts_of, schemes, left)


def is_quantized(config: ModelConfig) -> bool:
    return config.quantization is not None or quantization_keys(config) is not None


def select_kernels(device: torch.device, dtype: torch.dtype) -> tuple[QuantKernel, ExpertsKernel]:
    """Our kernels on CUDA in 16 bits, else torch."""
    if device.type != "cuda" or dtype == torch.float32:
        return CpuQuantKernel(), CpuExperts()
    # Slow to import: Triton.
    from asyncllm.models.quantization.cuda_experts import CudaExperts
    from asyncllm.models.quantization.cuda_kernel import CudaQuantKernel

    kernel = CudaQuantKernel(device, dtype)
    return kernel, CudaExperts(kernel)


def _reader_of(config: ModelConfig) -> ReaderOf | None:
    found = quantization_keys(config)
    if config.quantization is not None:
        if found is not None:
            raise ModelLoadError(
                f"{config.path}: quantization {config.quantization!r} is for checkpoints in 16 "
                f"bits, and this one is quantised already ({found[0]})"
            )
        return online(config.quantization)
    if found is None:
        return None
    name, keys = found
    if name not in FORMATS:
        raise keys.error("quant_method", f"is not served, only {', '.join(FORMATS)}")
    return FORMATS[name](keys, _headers(config))


def _headers(config: ModelConfig) -> Header:
    """Looks up shape and dtype of a checkpoint's tensor; None if there is no such tensor."""

    @cache
    def checkpoint() -> Checkpoint | None:
        try:
            return Checkpoint(config.path)
        except ModelLoadError:  # raised again where the weights are asked for
            return None

    def header(name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        opened = checkpoint()
        if opened is None or name not in opened.names:
            return None
        shape, dtype = opened.header(name)
        return tuple(shape), DTYPES.get(dtype, torch.uint8)

    return header
