"""The method of each linear layer of a model: by its checkpoint, or by `--quantization`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.layers.linear_method import LinearMethod, UnquantizedLinearMethod
from asyncllm.models.layers.ops import Ops
from asyncllm.models.loader import DTYPES
from asyncllm.models.quantization.bitsandbytes_files import bitsandbytes
from asyncllm.models.quantization.compressed_files import compressed_tensors
from asyncllm.models.quantization.cpu_kernel import CpuKernel
from asyncllm.models.quantization.file_config import Keys, quantization_keys
from asyncllm.models.quantization.fp8_files import ReaderOf, fp8, modelopt
from asyncllm.models.quantization.method import Kernel, QuantizedLinearMethod, Reader
from asyncllm.models.quantization.online import online
from asyncllm.models.quantization.packed_files import auto_round, awq, gptq
from asyncllm.models.quantization.sources import Header

logger = logging.getLogger("asyncllm")

FORMATS: dict[str, Callable[[Keys, Header], ReaderOf]] = {
    "fp8": fp8,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "bitsandbytes": bitsandbytes,
}


def linear_methods(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops
) -> Callable[[str], LinearMethod]:
    """A layer's name in the checkpoint -> its method. Raises `ModelLoadError`."""
    plain = UnquantizedLinearMethod(dtype, device, ops)
    reader_of = _reader_of(config)
    if reader_of is None:
        return lambda name: plain
    kernel = select_kernel(device, dtype, ops)
    if device.type == "cuda":
        logger.info("persistent decode and skinny GEMM are for 16 bits: weights are quantised")

    @cache
    def method(reader: Reader) -> LinearMethod:
        return QuantizedLinearMethod(reader, kernel, dtype, device)

    def method_of(name: str) -> LinearMethod:
        reader = reader_of(name)
        return plain if reader is None else method(reader)

    return method_of


def is_quantized(config: ModelConfig) -> bool:
    return config.quantization is not None or quantization_keys(config) is not None


def select_kernel(device: torch.device, dtype: torch.dtype, ops: Ops) -> Kernel:
    """Ours on CUDA, in 16 bits; torch's else."""
    if device.type != "cuda" or dtype == torch.float32:
        return CpuKernel()
    from asyncllm.models.quantization.cuda_kernel import CudaKernel  # slow to import: Triton

    return CudaKernel(device, dtype, ops)


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
    """Shape and dtype of a tensor of the checkpoint; None where there is none, or no checkpoint."""

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
