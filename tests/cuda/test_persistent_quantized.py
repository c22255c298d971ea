"""The persistent decode kernel of quantised weights, emulated, against layers in 16 bits that have
the matrices which the quantised ones mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from asyncllm.kernels import persistent_decode
from asyncllm.kernels.balanced_decode import shape_definitions
from asyncllm.kernels.declaration import DenseShape, Start
from asyncllm.kernels.persistent_decode import (
    FORMATS,
    KERNEL,
    PLAIN,
    WIDE,
    definitions,
)
from asyncllm.kernels.quant_gemm.words import to_words
from asyncllm.model_config import ModelConfig
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.persistent_decode import weight_format
from asyncllm.models.quantization.scheme import unpack
from asyncllm.models.registry import build_model
from tests.cuda.test_persistent_decode import (
    BLOCK_SIZE,
    CONFIGS,
    CPU,
    MAX_LEN,
    SHAPE,
    Case,
    case,
    check_orders,
    check_sizes,
    check_step,
    check_waiting,
    compile_impatient,
    compiled,
)
from tests.quantized_twins import copy_meaning, fill_twin, quantized_config

__all__ = ["compiled"]  # a fixture
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# Slices of 512 columns: one or three of a product, which warps share unevenly.
WIDE_CONFIG = LlamaConfig(
    **SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8},
    num_key_value_heads=4,
    mlp_bias=True,
)


def in_words(model: DenseDecoder) -> DenseDecoder:
    """Its weights as a GPU's kernels take them."""
    for linear in [linear for layer in model.layers for linear in layer.linears]:
        weight = linear.weights["weight"]
        if weight.dtype == torch.uint8:
            weight.view(torch.int32).copy_(to_words(unpack(weight)))
    return model


@dataclass
class QuantizedCase(Case):
    """Its layers are in 16 or 32 bits, and mean what the kernel's do: of config `quantized`."""

    quantized: ModelConfig

    def kernel_model(self) -> DenseDecoder:
        return in_words(self.quantized_model())

    def quantized_model(self) -> DenseDecoder:
        model = build_model(self.quantized, torch.bfloat16, CPU, TorchOps(), MAX_LEN)
        decoder = cast(DenseDecoder, model)
        fill_twin(decoder, super().model(torch.bfloat16))
        return decoder

    def model(self, dtype: torch.dtype) -> DenseDecoder:
        model = super().model(dtype)
        copy_meaning(model, self.quantized_model())
        return model


def quantized_case(
    weights: str, config: PretrainedConfig, folder: Path, positions: list[int]
) -> QuantizedCase:
    step = case(config, folder, positions)
    rows = step.positions, step.block_tables, step.token_ids
    return QuantizedCase(step.config, *rows, quantized_config(step.config, weights))


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


@pytest.mark.slow
def test_the_order_of_threads_does_not_matter(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    step = quantized_case("INT4_OFFSETS", WIDE_CONFIG, tmp_path, [60, 4])
    check_orders(step, compiled(flags_of(step.quantized, "INT4_OFFSETS", WIDE)), 5)


@pytest.mark.slow
def test_steps_of_different_sizes_alternate(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    step = quantized_case("FP8", WIDE_CONFIG, tmp_path, [60, 4, 17])
    check_sizes(step, compiled(flags_of(step.quantized, "FP8", WIDE)), 5)


@pytest.mark.slow
def test_a_step_that_waits_in_vain_fails_its_rows_and_no_later_one(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    step = quantized_case("INT4", WIDE_CONFIG, tmp_path, [90, 4])
    flags = flags_of(step.quantized, "INT4", WIDE)
    check_waiting(step, compiled(flags), compile_impatient(tmp_path, flags))


@pytest.mark.parametrize("weights", [PLAIN, *FORMATS.values(), None])
def test_a_start_compiles_it_for_each_of_its_formats(
    weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_decode, "num_sms", lambda device: 30)
    config = case(WIDE_CONFIG, tmp_path, [1]).config
    model = build_model(config, torch.bfloat16, torch.device("meta"), TorchOps(), MAX_LEN)
    start = Start(
        **dict.fromkeys((field.name for field in fields(Start)), cast(Any, None))
        | {
            "free_decode_sizes": [1],
            "num_ranks": 1,
            "dense_weights": weights,
            "sizes": DenseShape.of(config),
            "layers": model.attention_layers,
            "kv_dtype": torch.bfloat16,
            "block_size": BLOCK_SIZE,
        }
    )
    found = KERNEL.definitions_for(start)
    assert (found is None) == (weights is None)
