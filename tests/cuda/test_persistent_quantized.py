"""The persistent decode kernel of quantised weights, emulated, against layers in 16 bits that have
the matrices which the quantised ones mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from asyncllm.kernels.balanced_decode import shape_definitions
from asyncllm.kernels.declaration import DenseShape
from asyncllm.kernels.persistent_decode import WIDE, definitions
from asyncllm.kernels.quant_gemm.words import to_words
from asyncllm.model_config import ModelConfig, Quantization
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.persistent_decode import weight_format
from asyncllm.models.quantization.method import QuantizedLinearMethod
from asyncllm.models.quantization.scheme import dequantize, unpack
from asyncllm.models.registry import build_model
from tests.cuda.test_persistent_decode import (
    BLOCK_SIZE,
    CONFIGS,
    CPU,
    MAX_LEN,
    SHAPE,
    Case,
    case,
    check_step,
    compiled,
)

__all__ = ["compiled"]  # a fixture
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# Slices of 512 columns: one or three of a product, which warps share unevenly.
WIDE_CONFIG = LlamaConfig(
    **SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8},
    num_key_value_heads=4,
    mlp_bias=True,
)


class QuantizedCase(Case):
    """Its layers are in 16 or 32 bits, and mean what the kernel's quantised ones do."""

    quantization: Quantization

    def kernel_model(self) -> DenseDecoder:
        model = self.quantized_model()
        for layer in model.layers:
            for linear in layer.linears:
                weight = linear.weights["weight"]
                if weight.dtype == torch.uint8:  # as a GPU's kernels take it
                    weight.view(torch.int32).copy_(to_words(unpack(weight)))
        return model

    def quantized_model(self) -> DenseDecoder:
        config = replace(self.config, quantization=self.quantization)
        model = cast(DenseDecoder, build_model(config, torch.bfloat16, CPU, TorchOps(), MAX_LEN))
        generator = torch.Generator().manual_seed(1)
        for load in model.loads():
            noise = torch.randn(load.file_shape or load.view.shape, generator=generator)
            made = (0.1 * noise if noise.dim() > 1 else 1 + 0.3 * noise).bfloat16()
            load.view.copy_(made if load.transform is None else load.transform(made))
        return model

    def model(self, dtype: torch.dtype) -> DenseDecoder:
        model = super().model(dtype)
        for layer, quantized in zip(model.layers, self.quantized_model().layers, strict=True):
            for linear, other in zip(layer.linears, quantized.linears, strict=True):
                assert isinstance(other.method, QuantizedLinearMethod)
                fields = (other.weights.get(name) for name in ("weight", "scale", "offset"))
                linear.weights["weight"].copy_(dequantize(other.method.scheme, *fields))
        return model


def quantized_case(
    quantization: Quantization, config: PretrainedConfig, folder: Path, positions: list[int]
) -> QuantizedCase:
    step = case(config, folder, positions)
    made = QuantizedCase(step.config, step.positions, step.block_tables, step.token_ids)
    made.quantization = quantization
    return made


def flags_of(config: ModelConfig, quantization: Quantization, columns: int) -> tuple[str, ...]:
    """With slices of so many columns, which a kernel for such small models would not have."""
    config = replace(config, quantization=quantization)
    model = build_model(config, torch.bfloat16, torch.device("meta"), TorchOps(), MAX_LEN)
    weights = weight_format(model)
    assert weights is not None and weights.lower() == quantization
    layers = model.attention_layers
    flags = definitions(DenseShape.of(config), layers, torch.bfloat16, BLOCK_SIZE, 30, weights)
    shape = shape_definitions(layers[0], BLOCK_SIZE)
    assert flags == (*shape, f"-DWEIGHTS={weights}", "-DCOLUMNS=256")
    return *shape, f"-DWEIGHTS={weights}", f"-DCOLUMNS={columns}"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize(
    ("config", "columns", "positions", "num_blocks"),
    [
        (CONFIGS["qwen3"], 256, [15, 16, 17, 0, 0, 1, 63, 64], 3),
        (CONFIGS["llama-mqa-128"], 256, [90], 9),
        (WIDE_CONFIG, WIDE, [7, 90, 12], 6),
        (WIDE_CONFIG, WIDE, [200], 5),
    ],
    ids=["several-rows", "one-row", "wide-several-rows", "wide-one-row"],
)
def test_equals_the_layers(
    compiled: Callable[[tuple[str, ...]], Any],
    tmp_path: Path,
    quantization: Quantization,
    config: PretrainedConfig,
    columns: int,
    positions: list[int],
    num_blocks: int,
) -> None:
    step = quantized_case(quantization, config, tmp_path, positions)
    check_step(step, compiled(flags_of(step.config, quantization, columns)), num_blocks)
