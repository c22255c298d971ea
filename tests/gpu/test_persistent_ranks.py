"""The persistent decode kernel on GPUs that share a model, against the kernels of every other step.

Each rank is a process. Needs two GPUs, some tests four.
`pytest -m gpu tests/gpu/test_persistent_ranks.py -v -s`
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from asyncllm import AsyncLLMEngine, RequestOutput
from asyncllm.attention.base import DecodeRows, StepMixer
from asyncllm.engine.text.prompt import TokensPrompt
from asyncllm.graphs.decode_graphs import PERSISTENT
from asyncllm.kernels.declaration import DenseShape, num_sms
from asyncllm.kernels.persistent_decode import KERNEL, PLAIN, definitions
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import TokenInputs
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.models.parallel.mesh import Alone, Mesh
from asyncllm.models.parallel.stores import find_store, open_store
from asyncllm.models.persistent_decode import PersistentDecode, shared_bytes
from asyncllm.models.registry import build_model
from tests.caches import uniform_cache
from tests.gpu.test_shared_experts import expect_near
from tests.models.tiny_checkpoints import random_reference
from tests.parallel.engines import greedy
from tests.quantized_twins import copy_meaning, quantized_config
from tests.waiting import run, until

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")]
CUDA = torch.device("cuda")
BLOCK_SIZE, MAX_LEN = 16, 8192
PAGES = MAX_LEN // BLOCK_SIZE
CONFIG: dict[str, Any] = {
    "vocab_size": 31999,  # padded
    "max_position_embeddings": MAX_LEN,
    "num_hidden_layers": 3,
    "attention_bias": True,
}
# An 8B model's sizes, and a 70B model's, of which blocks have several groups of outputs.
SIZES = {
    "8b": (4096, 14336, 32, 8),
    "70b": (8192, 28672, 64, 8),
}
POSITIONS = [[0], [639], [17, 640], [1, 15, 16, 300, 1023, 4096, 5000, 31]]
REPLAYS, SECONDS = 200, 300
ENGINE: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 1024,
    "max_num_seqs": 8, "gpu_memory_utilization": 0.3, "swap_space": 0.1,
}  # fmt: skip
TOLERANCE = {PLAIN: 0.03}  # relative; else 0.05: the meaning of weights is rounded to 16 bits


class Rank:
    def __init__(self, folder: Path, weights: str, mesh: CollectiveMesh) -> None:
        from asyncllm.attention.flashinfer.backend import FlashInferAttention

        self.weights, self.mesh = weights, mesh
        config = ModelConfig.from_folder(folder)
        self.plain = plain = build(config, mesh)
        self.model = model = plain
        if weights != PLAIN:
            self.model = model = build(quantized_config(config, weights), mesh)
            copy_meaning(plain, model)
            model.finish_loading()
        layer = model.attention_layers[0]
        self.cache = uniform_cache(
            num_layers=config.num_layers, num_pages=8 * PAGES + 1, block_size=BLOCK_SIZE,
            num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, dtype=torch.bfloat16,
            device=CUDA,
        )  # fmt: skip
        torch.manual_seed(mesh.config.rank)
        for pages in self.cache.layers:
            pages.normal_()
        self.attention = FlashInferAttention(self.cache, model.attention_layers)
        num_ranks = mesh.config.tp
        sizes = DenseShape.of(config).share(num_ranks)
        shape = sizes, model.attention_layers, torch.bfloat16, BLOCK_SIZE, num_sms(CUDA)
        flags = definitions(*shape, weights, num_ranks)
        launch = KERNEL.begin_loading(CUDA, flags)()
        words = mesh.share_words(shared_bytes(model, mesh.config))
        assert flags is not None and launch is not None and words is not None
        self.persistent = PersistentDecode(model, self.cache, launch, num_sms(CUDA), words)
        generator = torch.Generator(CUDA).manual_seed(0)  # the same on all ranks
        tables = torch.randperm(8 * PAGES, device=CUDA, generator=generator)
        self.tables = (1 + tables).int().view(8, PAGES)
        self.tokens = torch.randint(0, 31999, (8,), device=CUDA, generator=generator).int()

    def rows(self, positions: list[int]) -> tuple[torch.Tensor, DecodeRows]:
        where = torch.tensor(positions, device=CUDA, dtype=torch.int32)
        return self.tokens[: len(positions)], DecodeRows((self.tables[: len(positions)],), where)

    def by_layers(self, tokens: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        mixer = StepMixer(self.attention.decode(rows))
        hidden = self.plain.forward(TokenInputs(tokens, rows.positions), mixer)
        return self.plain.compute_logits(hidden)

    def check_steps(self) -> None:
        for positions in POSITIONS * 3:
            tokens, rows = self.rows(positions)
            expected = self.by_layers(tokens, rows).double()
            ours = self.persistent.forward(tokens, rows, None).double()
            gap = ((ours - expected).norm() / expected.norm()).item()
            assert gap < TOLERANCE.get(self.weights, 0.05), (positions, gap)
        assert not self.persistent._words[-1]

    def check_replays(self) -> None:
        """Graphs of several sizes alternate, each always the same; and the time of each."""
        stream, graphs = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for size in (8, 1, 2):
                tokens, rows = self.rows(POSITIONS[-1][:size])
                for run in (self.by_layers, self._by_kernel):
                    expected = run(tokens, rows).clone()
                    stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        logits = run(tokens, rows)
                    graphs.append((size, run.__name__, graph, logits, expected, tokens, rows))
            for _ in range(REPLAYS):
                for *_names, graph, logits, expected, _, _ in graphs:
                    logits.zero_()
                    graph.replay()
                    assert torch.equal(logits, expected)
            for size, name, graph, *_kept in graphs:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(REPLAYS):
                    graph.replay()
                end.record()
                stream.synchronize()
                if self.mesh.config.rank == 0:
                    ms = start.elapsed_time(end) / REPLAYS
                    print(f"{size} rows, {name}: {ms:.3f} ms", flush=True)
            assert not self.persistent._words[-1]
            for _size, _name, graph, *_kept in graphs:
                graph.reset()  # NCCL's end waits for it

    def _by_kernel(self, tokens: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        return self.persistent.forward(tokens, rows, None)

    def check_closing(self) -> None:
        """A rank whose others do not come ends its waiting as its mesh is closed."""
        self.model.embed_tokens.mesh = Alone()
        tokens, rows = self.rows([17, 640])
        threading.Timer(0.5, self.mesh.close).start()
        start = time.perf_counter()
        logits = self.persistent.forward(tokens * 0, rows, None)
        torch.cuda.synchronize()
        assert 0.4 < time.perf_counter() - start < 3.0
        assert logits.isnan().any(dim=1).all()


def build(config: ModelConfig, mesh: Mesh) -> DenseDecoder:
    """Each tensor of the checkpoint is random by its name, the same on all ranks."""
    from asyncllm.models.layers.cuda_ops import CudaOps

    model = build_model(config, torch.bfloat16, CUDA, CudaOps(CUDA), MAX_LEN, mesh=mesh)
    for load in model.loads():
        generator = torch.Generator(CUDA).manual_seed(zlib.crc32(load.name.encode()))
        shape = load.file_shape or load.view.shape
        noise = torch.randn(shape, generator=generator, device=CUDA)
        made = (0.03 * noise if noise.dim() > 1 else 1 + 0.2 * noise).bfloat16()[load.part]
        load.view.copy_(made if load.transform is None else load.transform(made))
    return cast(DenseDecoder, model)


def run_rank(rank: int, num_ranks: int, port: int, folder: Path, weights: str) -> None:
    """In a process whose first device is its own. Ends it."""
    if rank == 0:
        store = open_store(num_ranks, socket.create_server(("127.0.0.1", port)))
    else:
        store = find_store(num_ranks, "127.0.0.1", port)
    config = MeshConfig(tp=num_ranks, rank=rank)
    hidden_size = ModelConfig.from_folder(folder).hf_config.hidden_size
    mesh = CollectiveMesh(config, store, "127.0.0.1", CUDA, hidden_size)
    assert mesh.sums is not None, "the ranks do not reach each other's memory"
    with torch.inference_mode():
        one = Rank(folder, weights, mesh)
        one.check_steps()
        one.check_replays()
        mesh.least(0)
        if rank == 0:
            one.check_closing()
            store.set("done", b"1")
            time.sleep(1)  # the store is this process's
        else:
            store.get("done")
    os._exit(0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("size", "weights"), [("8b", PLAIN), ("8b", "FP8"), ("8b", "INT4"), ("70b", PLAIN)]
)
def test_equals_the_layers(num_ranks: int, size: str, weights: str, tmp_path: Path) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip("needs more devices")
    hidden_size, intermediate_size, heads, kv_heads = SIZES[size]
    config = LlamaConfig(
        **CONFIG, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(NUM_GPUS)]
    context, ranks = multiprocessing.get_context("spawn"), []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(num_ranks):
            order = [devices[rank], *(each for each in devices if each != devices[rank])]
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(order))
            arguments = rank, num_ranks, port, tmp_path, weights
            ranks.append(context.Process(target=run_rank, args=arguments))
            ranks[-1].start()
    until = time.monotonic() + SECONDS
    for each in ranks:
        each.join(max(0.0, until - time.monotonic()))
        each.kill()
    assert [each.exitcode for each in ranks] == [0] * num_ranks


def answers_of(
    folder: Path, **args: Any
) -> tuple[list[RequestOutput], dict[str, list[int]] | None]:
    """To prompts of several lengths, at most eight at a time; how decode steps ran."""
    prompts = [[(7 * i + 31 * j) % 16000 for j in range(5 + 40 * i)] for i in range(12)]

    async def main() -> tuple[list[RequestOutput], dict[str, list[int]] | None]:
        async with AsyncLLMEngine(str(folder), **ENGINE | args) as engine:
            asked = (
                engine.generate(TokensPrompt(prompt_token_ids=ids), greedy(40, detokenize=False))
                for ids in prompts
            )
            await until(lambda: not engine.startup["decode_graphs_to_follow"])
            outputs = list(await asyncio.gather(*asked))
            return outputs, engine.startup["decode_kernels"]

    return run(main())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_engine_answers_like_one_rank(num_ranks: int, tmp_path: Path) -> None:
    """The built-in model is too small for it: a rank's half has 384 columns."""
    if num_ranks > NUM_GPUS:
        pytest.skip("needs more devices")
    config = LlamaConfig(
        vocab_size=16000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=3,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    with torch.inference_mode():
        random_reference(config).save_pretrained(tmp_path)
    expected, _ = answers_of(tmp_path, enforce_eager=True)
    for is_ahead in (True, False):
        ranks = {"tensor_parallel_size": num_ranks, "async_scheduling": is_ahead}
        ours, kernels = answers_of(tmp_path, **ranks)
        assert kernels is not None and kernels[PERSISTENT] == [1, 2, 4, 8]
        expect_near(ours, expected)
