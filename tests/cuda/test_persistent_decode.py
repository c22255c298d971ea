"""The persistent decode kernel, its CUDA source run on the CPU (emulator.h), against the layers.

Both see the same weights in bfloat16 and are measured by how far they are from float32.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from asyncllm.attention.base import DecodeRows, StepMixer
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.kernels import nvcc
from asyncllm.kernels.balanced_decode import shape_definitions
from asyncllm.kernels.declaration import Definitions, DenseShape, Launch
from asyncllm.kernels.persistent_decode import KERNEL, MAX_ROWS, definitions
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import TokenInputs
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.persistent_decode import PersistentDecode
from asyncllm.models.registry import build_model
from tests.caches import uniform_cache
from tests.cuda.emulated import compile_for_cpu

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_LEN = 2688
PAGES = MAX_LEN // BLOCK_SIZE
VOCAB_SIZE = 264
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "llama-dynamic": LlamaConfig(
        **SHAPE | {"max_position_embeddings": 128}, num_key_value_heads=2, rope_parameters=DYNAMIC
    ),
    "llama-mqa-128": LlamaConfig(**SHAPE, num_key_value_heads=1, head_dim=128, attention_bias=True),
    # More columns than warps take at once, more outputs than a block takes at once.
    "llama-wide": LlamaConfig(
        **SHAPE | {"hidden_size": 1280, "intermediate_size": 1536, "num_hidden_layers": 1},
        num_key_value_heads=2,
        head_dim=64,
        mlp_bias=True,
    ),
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Any]:
    """The source as a library of the CPU's, by its definitions."""
    folder = tmp_path_factory.mktemp("emulated")
    libraries: dict[tuple[str, ...], Any] = {}

    def load(flags: tuple[str, ...]) -> Any:
        if flags not in libraries:
            libraries[flags] = compile_for_cpu(KERNEL, flags, folder / f"{len(libraries)}.so")
        return libraries[flags]

    return load


@dataclass
class Case:
    """A model with its pages and a step's rows, made anew in any dtype from one seed."""

    config: ModelConfig
    positions: torch.Tensor
    block_tables: torch.Tensor
    token_ids: torch.Tensor

    def model(self, dtype: torch.dtype) -> DenseDecoder:
        generator = torch.Generator().manual_seed(1)
        model = build_model(self.config, dtype, CPU, TorchOps(), MAX_LEN)
        for tensor in [load.view for load in model.loads()]:
            noise = torch.randn(tensor.shape, generator=generator)
            wide = 0.1 * noise if tensor.dim() > 1 else 1 + 0.3 * noise  # norms, and biases too
            tensor.copy_(wide.bfloat16())
        return cast(DenseDecoder, model)

    def kernel_model(self) -> DenseDecoder:
        """The kernel is given this one."""
        return self.model(torch.bfloat16)

    def cache(self, dtype: torch.dtype) -> KVCache:
        generator = torch.Generator().manual_seed(2)
        model = self.config
        cache = uniform_cache(
            num_layers=model.num_layers, num_pages=MAX_ROWS * PAGES + 1, block_size=BLOCK_SIZE,
            num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype, device=CPU,
        )  # fmt: skip
        for layer in cache.layers:
            layer.copy_(torch.randn(layer.shape, generator=generator).bfloat16())
        return cache

    @property
    def rows(self) -> DecodeRows:
        return DecodeRows((self.block_tables,), self.positions, int(self.positions.max()) + 1)

    def by_layers(self, dtype: torch.dtype) -> tuple[torch.Tensor, KVCache]:
        model, cache = self.model(dtype), self.cache(dtype)
        attend = TorchAttention(cache).decode(self.rows)
        inputs = TokenInputs(self.token_ids, self.positions, self.positions + 1)
        hidden = model.forward(inputs, StepMixer(attend))
        return model.compute_logits(hidden), cache

    def by_persistent_kernel(self, function: Launch, num_blocks: int, seed: int = 0) -> Any:
        model, cache = self.kernel_model(), self.cache(torch.bfloat16)
        decode = PersistentDecode(
            model, cache, lambda args, blocks, _: function(args, blocks, seed), num_blocks
        )
        logits = decode.forward(self.token_ids, self.rows, self.positions + 1)
        assert not decode._words[-1]
        assert (decode._exchange[1] == -1).all()  # emptied for the next step
        assert (decode._exchange[0] != -1).any()
        again = self.cache(torch.bfloat16)
        for layer, fresh in zip(cache.layers, again.layers, strict=True):
            fresh.copy_(layer)
        assert torch.equal(decode.forward(self.token_ids, self.rows, self.positions + 1), logits)
        return logits, cache


def case(config: PretrainedConfig, folder: Path, positions: list[int]) -> Case:
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    tables = 1 + torch.randperm(MAX_ROWS * PAGES, generator=generator).view(MAX_ROWS, PAGES)
    tokens = torch.randint(0, VOCAB_SIZE, (len(positions),), generator=generator)
    return Case(
        ModelConfig.from_folder(folder),
        torch.tensor(positions, dtype=torch.int32),
        tables[: len(positions)].int(),
        tokens.int(),
    )


def function_for(compiled: Callable[[tuple[str, ...]], Any], config: ModelConfig) -> Any:
    model = build_model(config, torch.bfloat16, torch.device("meta"), TorchOps(), MAX_LEN)
    return compiled(shape_definitions(model.attention_layers[0], BLOCK_SIZE))


def flags_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Definitions | None:
    model = build_model(config, dtype, torch.device("meta"), TorchOps(), MAX_LEN)
    layers = model.attention_layers
    return definitions(DenseShape.of(config), layers, dtype, BLOCK_SIZE, num_blocks=30)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).norm().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "positions", "num_blocks"),
    [
        ("qwen3", [0, 3, 40, 200, 333], 5),  # splits of rows and heads one after another
        ("qwen3", [1300, 31, 700], 30),  # four splits, one and two of the five there may be
        ("qwen3", [15, 16, 17, 0, 0, 1, 63, 64], 3),
        ("qwen2", [1300], 24),  # more blocks than some products have units
        ("llama-mqa-128", [90, 1333], 9),
        ("llama-mqa-128", [2600], 9),  # eight splits
        ("llama-wide", [115, 120, 166, 97, 53, 24, 124, 7], 6),
    ],
)
def test_equals_the_layers(
    compiled: Callable[[tuple[str, ...]], Any],
    tmp_path: Path,
    name: str,
    positions: list[int],
    num_blocks: int,
) -> None:
    check_against_layers(compiled, tmp_path, name, positions, num_blocks)


@pytest.mark.slow
def test_equals_the_layers_of_one_model(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    check_against_layers(compiled, tmp_path, "llama-dynamic", [130, 60], 7)


def check_against_layers(
    compiled: Callable[[tuple[str, ...]], Any],
    tmp_path: Path,
    name: str,
    positions: list[int],
    num_blocks: int,
) -> None:
    step = case(CONFIGS[name], tmp_path, positions)
    assert flags_of(step.config) is not None
    check_step(step, function_for(compiled, step.config), num_blocks)


def check_step(step: Case, function: Launch, num_blocks: int, most: float = 1.2) -> None:
    """most: times as far from float32 as the layers are."""
    exact, exact_cache = step.by_layers(torch.float32)
    layers, layers_cache = step.by_layers(torch.bfloat16)
    ours, cache = step.by_persistent_kernel(function, num_blocks)
    assert distance(ours, exact) <= most * distance(layers, exact)
    assert distance(layers, exact) < 0.05 * exact.double().norm()  # so the bound means something
    (slots,) = step.rows.write_slots(BLOCK_SIZE)
    before = step.cache(torch.bfloat16)
    for ours_pages, layers_pages, exact_pages, old in zip(
        *(c.layers for c in (cache, layers_cache, exact_cache, before)), strict=True
    ):
        new = (slots // BLOCK_SIZE, slice(None), slots % BLOCK_SIZE)
        bound = most * distance(layers_pages[new], exact_pages[new])
        assert distance(ours_pages[new], exact_pages[new]) <= bound
        ours_pages[new] = old[new]
        assert torch.equal(ours_pages, old)  # nothing else is written


@pytest.mark.slow
def test_the_order_of_threads_does_not_matter(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    step = case(CONFIGS["qwen3"], tmp_path, [180, 4, 77])
    check_orders(step, function_for(compiled, step.config), 12)


def check_orders(step: Case, function: Launch, num_blocks: int) -> None:
    outcomes = [step.by_persistent_kernel(function, num_blocks, seed)[0] for seed in range(3)]
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


@pytest.mark.slow
def test_steps_of_different_sizes_alternate(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    """No step takes for its own what another of more or fewer rows left."""
    step = case(CONFIGS["qwen3"], tmp_path, [180, 4, 77])
    check_sizes(step, function_for(compiled, step.config), 12)


def check_sizes(step: Case, function: Launch, num_blocks: int) -> None:
    model, cache = step.kernel_model(), step.cache(torch.bfloat16)

    def new() -> PersistentDecode:
        return PersistentDecode(model, cache, lambda args, n, _: function(args, n, 0), num_blocks)

    def logits(decode: PersistentDecode, rows: slice) -> torch.Tensor:
        where = DecodeRows((step.block_tables[rows],), step.positions[rows])
        return decode.forward(step.token_ids[rows], where, step.positions[rows] + 1)

    sizes = [slice(0, 3), slice(1, 2), slice(1, 3), slice(2, 3), slice(0, 1), slice(0, 3)]
    decode = new()
    for rows in sizes:
        assert torch.equal(logits(decode, rows), logits(new(), rows)), rows


def compile_impatient(
    folder: Path, flags: tuple[str, ...], constant: str = "MAX_POLLS = 1 << 24", most: int = 1
) -> Any:
    """The kernel with blocks that wait for others hardly at all, or with another constant of
    exchange.cuh."""
    for sources in (KERNEL.source.parent, nvcc.INCLUDE_FOLDER):
        shutil.copytree(sources, folder / sources.name)
    source = folder / KERNEL.source.parent.name / KERNEL.source.name
    exchange = source.parent / "exchange.cuh"
    text = exchange.read_text()
    assert text.count(constant) == 1
    exchange.write_text(text.replace(constant, f"{constant.split()[0]} = {most}"))
    return compile_for_cpu(KERNEL, flags, folder / "impatient.so", source)


@pytest.mark.slow
def test_a_step_that_waits_in_vain_fails_its_rows_and_no_later_one(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    step = case(CONFIGS["qwen3"], tmp_path, [90, 4])
    flags = shape_definitions(step.kernel_model().attention_layers[0], BLOCK_SIZE)
    check_waiting(step, compiled(flags), compile_impatient(tmp_path, flags))


def check_waiting(step: Case, patient: Launch, impatient: Launch) -> None:
    """impatient: whose blocks wait for others hardly at all."""
    model, cache = step.kernel_model(), step.cache(torch.bfloat16)
    seeds = itertools.count()
    function = impatient

    def new() -> PersistentDecode:
        return PersistentDecode(model, cache, lambda args, n, _: function(args, n, next(seeds)), 8)

    def logits(decode: PersistentDecode) -> torch.Tensor:
        return decode.forward(step.token_ids, step.rows, step.positions + 1)

    decode = new()
    assert logits(decode).isnan().any(dim=1).all()
    assert decode._words[-1]
    assert int(decode._words[0]) == -(1 << 31)  # every block has been counted
    for layer, fresh in zip(cache.layers, step.cache(torch.bfloat16).layers, strict=True):
        layer.copy_(fresh)
    function = patient
    assert torch.equal(logits(decode), logits(new()))


def test_what_it_does_not_support(tmp_path: Path) -> None:
    def model(config: PretrainedConfig) -> ModelConfig:
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(tmp_path)
        return ModelConfig.from_folder(tmp_path)

    good = {**SHAPE, "num_key_value_heads": 2}
    assert flags_of(model(LlamaConfig(**good))) is not None
    assert flags_of(model(LlamaConfig(**good)), torch.float16) is None
    for change in (
        {"hidden_size": 320},
        {"intermediate_size": 400},
        {"vocab_size": 260},
        {"head_dim": 32},
        {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 64},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64},
    ):
        assert flags_of(model(LlamaConfig(**good | change))) is None, change
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert flags_of(model(Qwen2Config(**good, **windows))) is None
