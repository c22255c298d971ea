"""The persistent decode kernel against the kernels of every other step, captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from asyncllm.attention.base import DecodeRows, StepMixer
from asyncllm.kernels.declaration import DenseShape, num_sms
from asyncllm.kernels.persistent_decode import KERNEL, definitions
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import TokenInputs
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.persistent_decode import PersistentDecode
from asyncllm.models.registry import build_model
from tests.caches import uniform_cache

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
POSITIONS = [[0], [639], [8191], [17, 640], [0, 0, 1, 255], [1, 15, 16, 300, 1023, 4096, 5000, 31]]


class Model:
    """A random model with its pages, and both implementations."""

    def __init__(self, config: PretrainedConfig, folder: Path) -> None:
        from asyncllm.attention.flashinfer.backend import FlashInferAttention
        from asyncllm.models.layers.cuda_ops import CudaOps

        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        model_config = ModelConfig.from_folder(folder)
        device = torch.device("cuda")
        model = build_model(
            model_config, torch.bfloat16, device, CudaOps(device), max_model_len=MAX_LEN
        )
        for tensor in [load.view for load in model.loads()]:
            tensor.normal_(0, 0.03) if tensor.dim() > 1 else tensor.normal_(1, 0.2)
        self._model = cast(DenseDecoder, model)
        self.cache = uniform_cache(
            num_layers=model_config.num_layers, num_pages=8 * PAGES + 1, block_size=BLOCK_SIZE,
            num_kv_heads=model_config.num_kv_heads, head_dim=model_config.head_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        for layer in self.cache.layers:
            layer.normal_()
        self._attention = FlashInferAttention(self.cache, model.attention_layers)
        sizes, layers = DenseShape.of(model_config), model.attention_layers
        flags = definitions(sizes, layers, torch.bfloat16, BLOCK_SIZE, num_sms(device))
        launch = KERNEL.begin_loading(device, flags)()
        if launch is None:
            pytest.skip("no persistent decode on this device")
        self.persistent = PersistentDecode(self._model, self.cache, launch, num_sms(device))
        self.tables = (1 + torch.randperm(8 * PAGES, device=device)).int().view(8, PAGES)

    def rows(self, positions: list[int]) -> tuple[torch.Tensor, DecodeRows]:
        tokens = torch.randint(0, 32000, (len(positions),), device="cuda", dtype=torch.int32)
        where = torch.tensor(positions, device="cuda", dtype=torch.int32)
        return tokens, DecodeRows((self.tables[: len(positions)],), where)

    def by_layers(self, tokens: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        mixer = StepMixer(self._attention.decode(rows))
        hidden = self._model.forward(TokenInputs(tokens, rows.positions), mixer)
        return self._model.compute_logits(hidden)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield Model(CONFIGS[request.param], tmp_path)


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
        assert (ours - expected).norm() < 0.03 * expected.norm(), positions
        for layer, wanted in zip(model.cache.layers, keys_values, strict=True):
            assert (layer[new] - wanted).double().norm() < 0.03 * wanted.double().norm()
    assert not model.persistent.is_stuck


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
    assert not model.persistent.is_stuck
