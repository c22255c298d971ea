"""The persistent decode kernel against the kernels of every other step, captured and replayed.

Where its weights are quantised, the others' are in 16 bits, and what the quantised ones mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from asyncllm.attention.base import DecodeRows, StepMixer
from asyncllm.kernels.declaration import DenseShape, num_sms
from asyncllm.kernels.persistent_decode import FORMATS, KERNEL, PLAIN, definitions
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import TokenInputs
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.persistent_decode import PersistentDecode, weight_format
from asyncllm.models.registry import build_model
from tests.caches import uniform_cache
from tests.quantized_twins import copy_meaning, fill_twin, quantized_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK_SIZE = 16
MAX_LEN = 8192
PAGES = MAX_LEN // BLOCK_SIZE
SHAPE: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": MAX_LEN}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3-0.6b": Qwen3Config(
        **SHAPE, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
    ),
    "llama-8b": LlamaConfig(
        **SHAPE, hidden_size=4096, intermediate_size=14336, num_hidden_layers=3,
        num_attention_heads=32, num_key_value_heads=8,
    ),
    "llama-1b": LlamaConfig(
        **SHAPE, hidden_size=2048, intermediate_size=8192, num_hidden_layers=3,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    ),
    "llama-mha": LlamaConfig(
        **SHAPE, hidden_size=2048, intermediate_size=2816, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=32, head_dim=64, attention_bias=True,
    ),
    "llama-group-8": LlamaConfig(
        **SHAPE, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=2, head_dim=128,
    ),
}  # fmt: skip
# With slices of 256 columns, of 512, of 256 with biases.
MODELS = [
    *((name, PLAIN) for name in CONFIGS),
    *((name, weights) for name in ("qwen3-0.6b", "llama-8b") for weights in FORMATS.values()),
    *(("llama-mha", weights) for weights in ("FP8", "INT4_OFFSETS")),
]
POSITIONS = [[0], [639], [8191], [17, 640], [0, 0, 1, 255], [1, 15, 16, 300, 1023, 4096, 5000, 31]]


def build(config: ModelConfig) -> DenseDecoder:
    from asyncllm.models.layers.cuda_ops import CudaOps

    device = torch.device("cuda")
    model = build_model(config, torch.bfloat16, device, CudaOps(device), max_model_len=MAX_LEN)
    return cast(DenseDecoder, model)


def quantized_twin(plain: DenseDecoder, config: ModelConfig, weights: str) -> DenseDecoder:
    """A model in this format; the other's matrices become what its mean."""
    model = build(quantized_config(config, weights))
    fill_twin(model, plain)
    copy_meaning(plain, model)
    model.finish_loading()
    return model


class Model:
    """A random model with its pages, and both implementations."""

    def __init__(self, config: PretrainedConfig, weights: str, folder: Path) -> None:
        from asyncllm.attention.flashinfer.backend import FlashInferAttention

        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        model_config, device = ModelConfig.from_folder(folder), torch.device("cuda")
        self._model = build(model_config)
        for tensor in [load.view for load in self._model.loads()]:
            tensor.normal_(0, 0.03) if tensor.dim() > 1 else tensor.normal_(1, 0.2)
        self.cache = uniform_cache(
            num_layers=model_config.num_layers, num_pages=8 * PAGES + 1, block_size=BLOCK_SIZE,
            num_kv_heads=model_config.num_kv_heads, head_dim=model_config.head_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        for layer in self.cache.layers:
            layer.normal_()
        self._attention = FlashInferAttention(self.cache, self._model.attention_layers)
        model, self.tolerance = self._model, 0.03  # relative
        if weights != PLAIN:  # whose meaning is rounded to 16 bits for the others
            model, self.tolerance = quantized_twin(model, model_config, weights), 0.05
        assert weight_format(model) == weights
        sizes, layers = DenseShape.of(model_config), model.attention_layers
        flags = definitions(sizes, layers, torch.bfloat16, BLOCK_SIZE, num_sms(device), weights)
        assert flags is not None
        launch = KERNEL.begin_loading(device, flags)()
        if launch is None:
            pytest.skip("no persistent decode on this device")
        self.persistent = PersistentDecode(model, self.cache, launch, num_sms(device))
        self.tables = (1 + torch.randperm(8 * PAGES, device=device)).int().view(8, PAGES)

    def rows(self, positions: list[int]) -> tuple[torch.Tensor, DecodeRows]:
        tokens = torch.randint(0, 32000, (len(positions),), device="cuda", dtype=torch.int32)
        where = torch.tensor(positions, device="cuda", dtype=torch.int32)
        return tokens, DecodeRows((self.tables[: len(positions)],), where)

    def by_layers(self, tokens: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        mixer = StepMixer(self._attention.decode(rows))
        hidden = self._model.forward(TokenInputs(tokens, rows.positions), mixer)
        return self._model.compute_logits(hidden)


@pytest.fixture(params=MODELS, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    name, weights = request.param
    torch.manual_seed(0)
    with torch.inference_mode():
        yield Model(CONFIGS[name], weights, tmp_path)


def test_equals_the_layers(model: Model) -> None:
    for positions in POSITIONS:
        tokens, rows = model.rows(positions)
        (slots,) = rows.write_slots(BLOCK_SIZE)
        new = (slots // BLOCK_SIZE, slice(None), slots % BLOCK_SIZE)
        expected = model.by_layers(tokens, rows).double()
        keys_values = [layer[new].clone() for layer in model.cache.layers]
        for layer in model.cache.layers:
            layer[new] = 0
        ours = model.persistent.forward(tokens, rows, None).double()
        assert (ours - expected).norm() < model.tolerance * expected.norm(), positions
        for layer, wanted in zip(model.cache.layers, keys_values, strict=True):
            difference = (layer[new] - wanted).double().norm()
            assert difference < model.tolerance * wanted.double().norm()
    assert not model.persistent._words[-1]


def test_replayed_many_times(model: Model) -> None:
    """Graphs of several sizes alternate, each always the same: sums are added in one order, and no
    step takes for its own what another left."""
    positions = [1, 15, 16, 300, 1023, 4096, 5000, 31]
    stream = torch.cuda.Stream()
    graphs = []
    with torch.cuda.stream(stream):
        for size in (8, 1, 3, 2):
            tokens, rows = model.rows(positions[:size])
            expected = model.persistent.forward(tokens, rows, None).clone()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = model.persistent.forward(tokens, rows, None)
            graphs.append((graph, logits, expected, tokens, rows))
        for _ in range(50):
            for graph, logits, expected, *_kept in graphs:
                logits.zero_()
                graph.replay()
                assert torch.equal(logits, expected)
    assert not model.persistent._words[-1]
