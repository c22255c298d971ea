"""The persistent decode kernel of quantised weights, emulated, against layers in 16 bits that have
the matrices which the quantised ones mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from asyncllm.kernels.balanced_decode import shape_definitions
from asyncllm.kernels.declaration import DenseShape
from asyncllm.kernels.persistent_decode import FORMATS, WIDE, definitions
from asyncllm.kernels.quant_gemm.words import to_words
from asyncllm.model_config import ModelConfig, Quantization
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import _dummy_file
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
ONLINE: dict[str, Quantization] = {"FP8": "fp8", "INT8": "int8", "INT4": "int4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
# Slices of 512 columns: one or three of a product, which warps share unevenly.
WIDE_CONFIG = LlamaConfig(
    **SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8},
    num_key_value_heads=4,
    mlp_bias=True,
)


@dataclass
class QuantizedCase(Case):
    """Its layers are in 16 or 32 bits, and mean what the kernel's do: of config `quantized`."""

    quantized: ModelConfig

    def kernel_model(self) -> DenseDecoder:
        model = self.quantized_model()
        for layer in model.layers:
            for linear in layer.linears:
                weight = linear.weights["weight"]
                if weight.dtype == torch.uint8:  # as a GPU's kernels take it
                    weight.view(torch.int32).copy_(to_words(unpack(weight)))
        return model

    def quantized_model(self) -> DenseDecoder:
        """Made of the same matrices, where its files have such."""
        model = build_model(self.quantized, torch.bfloat16, CPU, TorchOps(), MAX_LEN)
        plain = {load.name: load.view for load in super().model(torch.bfloat16).loads()}
        generator = torch.Generator().manual_seed(4)
        for load in model.loads():
            made = plain.get(load.name)
            made = _dummy_file(load, generator) if made is None else made
            load.view.copy_(made if load.transform is None else load.transform(made))
        return cast(DenseDecoder, model)

    def model(self, dtype: torch.dtype) -> DenseDecoder:
        model = super().model(dtype)
        for layer, quantized in zip(model.layers, self.quantized_model().layers, strict=True):
            for linear, other in zip(layer.linears, quantized.linears, strict=True):
                assert isinstance(other.method, QuantizedLinearMethod)
                weight, scale = other.weights["weight"], other.weights["scale"]
                offset = other.weights.get("offset")
                exact = dequantize(other.method.scheme, weight, scale, offset)
                linear.weights["weight"].copy_(exact)
        return model


def quantized_case(
    weights: str, config: PretrainedConfig, folder: Path, positions: list[int]
) -> QuantizedCase:
    step = case(config, folder, positions)
    if weights in ONLINE:
        quantized = replace(step.config, quantization=ONLINE[weights])
    else:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"quantization_config": AWQ}))
        quantized = ModelConfig.from_folder(folder)
    return QuantizedCase(step.config, step.positions, step.block_tables, step.token_ids, quantized)


def flags_of(config: ModelConfig, weights: str, columns: int) -> tuple[str, ...]:
    """With slices of so many columns, which a kernel for such small models would not have."""
    model = build_model(config, torch.bfloat16, torch.device("meta"), TorchOps(), MAX_LEN)
    assert weight_format(model) == weights
    layers = model.attention_layers
    flags = definitions(DenseShape.of(config), layers, torch.bfloat16, BLOCK_SIZE, 30, weights)
    shape = shape_definitions(layers[0], BLOCK_SIZE)
    assert flags == (*shape, f"-DWEIGHTS={weights}", "-DCOLUMNS=256")
    return *shape, f"-DWEIGHTS={weights}", f"-DCOLUMNS={columns}"


@pytest.mark.slow
@pytest.mark.parametrize("weights", FORMATS.values())
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
    weights: str,
    config: PretrainedConfig,
    columns: int,
    positions: list[int],
    num_blocks: int,
) -> None:
    step = quantized_case(weights, config, tmp_path, positions)
    most = 1.2 if len(positions) > 1 else 2.0  # one row's roundings come from one to the next
    check_step(step, compiled(flags_of(step.quantized, weights, columns)), num_blocks, most)
