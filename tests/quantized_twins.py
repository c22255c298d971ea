"""A decoder with quantised weights, and one in 16 or 32 bits whose matrices are what those mean."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from asyncllm.model_config import ModelConfig, Quantization
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.loader import _dummy_file
from asyncllm.models.quantization.method import QuantizedLinearMethod
from asyncllm.models.quantization.scheme import dequantize

# By the persistent kernel's names of formats (kernels/persistent_decode: FORMATS).
ONLINE: dict[str, Quantization] = {"FP8": "fp8", "INT8": "int8", "INT4": "int4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def quantized_config(plain: ModelConfig, weights: str) -> ModelConfig:
    """The config of the same checkpoint, quantised while it is loaded, or, for offsets, of one of
    AWQ's: config.json is changed then."""
    if weights in ONLINE:
        return replace(plain, quantization=ONLINE[weights])
    file = plain.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": AWQ}))
    return ModelConfig.from_folder(plain.path)


def fill_twin(quantized: DenseDecoder, plain: DenseDecoder) -> None:
    """Load what the other has, where a file of this format has such, else random tensors."""
    found = {load.name: load.view for load in plain.loads()}
    device = plain.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(4)
    for load in quantized.loads():
        made = found.get(load.name)
        made = _dummy_file(load, generator) if made is None else made
        load.view.copy_(made if load.transform is None else load.transform(made))
    for linear in [linear for layer in quantized.layers for linear in layer.linears]:
        if "offset" in linear.weights:  # random: too large for attention to be smooth
            linear.weights["scale"].mul_(1 / 16)
            linear.weights["offset"].mul_(1 / 16)


def copy_meaning(plain: DenseDecoder, quantized: DenseDecoder) -> None:
    """The matrices of quantised layers, before they are prepared for kernels."""
    for layer, other in zip(plain.layers, quantized.layers, strict=True):
        for linear, its in zip(layer.linears, other.linears, strict=True):
            assert isinstance(its.method, QuantizedLinearMethod)
            weight, scale, offset = (its.weights.get(n) for n in ("weight", "scale", "offset"))
            assert weight is not None and scale is not None
            exact = dequantize(its.method.scheme, weight, scale, offset)
            linear.weights["weight"].copy_(exact)
