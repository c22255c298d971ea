"""The persistent decode kernel on tensor-parallel ranks, emulated, against layers whose sums go
through the mesh. The grids of all ranks run at the same time, each on memory of its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from asyncllm.attention.base import DecodeRows, StepMixer
from asyncllm.attention.kv_cache import KVCache
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.kernels.declaration import Definitions, DenseShape, Launch
from asyncllm.kernels.persistent_decode import PLAIN, definitions
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import TokenInputs
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.parallel.mesh import Alone, Mesh
from asyncllm.models.persistent_decode import PersistentDecode, shared_bytes
from asyncllm.models.registry import build_model
from asyncllm.worker.step_captures import persistent_step
from tests.caches import uniform_cache
from tests.cuda.test_persistent_decode import (
    BLOCK_SIZE,
    CPU,
    MAX_LEN,
    SHAPE,
    Case,
    case,
    compile_impatient,
    compiled,
    distance,
)
from tests.cuda.test_persistent_quantized import in_words
from tests.parallel.thread_mesh import ThreadMesh, on_ranks
from tests.quantized_twins import copy_meaning, quantized_config

__all__ = ["compiled"]  # a fixture
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
NUM_BLOCKS, TOGETHER = 3, 1 << 16  # as emulator.h has it
POSITIONS = [15, 16, 17, 0, 0, 1, 163, 64]
STEPS = [slice(0, 8), slice(6, 7), slice(4, 7), slice(0, 1), slice(0, 8)]  # of these rows
# Of four ranks two have the same KV head. The vocabulary of the last one is padded.
CONFIGS = {
    num_ranks: LlamaConfig(
        **SHAPE | {"vocab_size": 287, "num_attention_heads": heads, "intermediate_size": size},
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        mlp_bias=True,
    )
    for num_ranks, heads, size in ((2, 8, 512), (4, 16, 1024))
}


class RankMesh(ThreadMesh):
    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As kernels sum: rounded once."""
        return x.copy_(torch.stack(self._exchange(x, self._stage)).float().sum(0))


class LoneMesh(RankMesh):
    """A rank whose others are gone has this one, but for their last answer."""

    _stage: Any = None

    def _exchange(self, x: torch.Tensor, meeting: Any) -> list[torch.Tensor]:
        return [x] * self.config.tp


class Host:
    """GPUs that reach each other's memory. The launch that comes last runs all of them."""

    def __init__(self, num_ranks: int, num_bytes: int, kernel: Launch, num_here: int = 0) -> None:
        self.kernel = kernel
        self.memories = [torch.full((num_bytes,), -1, dtype=torch.int8) for _ in range(num_ranks)]
        self.closed = torch.zeros(1, dtype=torch.int32)
        self._launched: dict[int, Any] = {}
        self._barrier = threading.Barrier(num_here or num_ranks, self._run)
        self._seed = 0

    def words(self, rank: int) -> Any:
        """The rank's `PeerWords`."""
        addresses = [memory.data_ptr() for memory in self.memories]
        return SimpleNamespace(rank=rank, addresses=addresses, closed=self.closed.data_ptr())

    def launch(self, rank: int) -> Launch:
        def launch(args: object, num_blocks: int, stream: int) -> int:
            self._launched[rank] = args
            self._barrier.wait()
            return 0

        return launch

    def _run(self) -> None:
        self._seed += 1
        stream = len(self._launched) * TOGETHER + self._seed
        for args in self._launched.values():
            assert self.kernel(args, NUM_BLOCKS, stream) == 0
        self._launched.clear()


class Rank:
    """A rank's share of a case's weights and pages."""

    def __init__(self, step: Case, weights: str, mesh: Mesh) -> None:
        self._step, self._weights, self._mesh = step, weights, mesh
        self._caches: list[KVCache] = []  # of which kernels know addresses alone

    def _model(self, config: ModelConfig, dtype: torch.dtype) -> DenseDecoder:
        model = build_model(config, dtype, CPU, TorchOps(), MAX_LEN, mesh=self._mesh)
        file = {load.name: load.view for load in self._step.model(torch.bfloat16).loads()}
        for load in model.loads():
            made = file[load.name][load.part]
            load.view.copy_(made if load.transform is None else load.transform(made))
        return cast(DenseDecoder, model)

    def _quantized_model(self) -> DenseDecoder:
        return self._model(quantized_config(self._step.config, self._weights), torch.bfloat16)

    def _cache(self, dtype: torch.dtype) -> KVCache:
        whole = self._step.cache(dtype)
        heads = self._mesh.config.kv_share(self._step.config.num_kv_heads)
        num_pages, _, _, _, head_dim = whole.layers[0].shape
        cache = uniform_cache(
            num_layers=len(whole.layers), num_pages=num_pages, block_size=BLOCK_SIZE,
            num_kv_heads=heads.stop - heads.start, head_dim=head_dim, dtype=dtype, device=CPU,
        )  # fmt: skip
        for layer, of_all in zip(cache.layers, whole.layers, strict=True):
            layer.copy_(of_all[..., heads, :])
        return cache

    def _rows(self, rows: slice) -> DecodeRows:
        return DecodeRows((self._step.block_tables[rows],), self._step.positions[rows], MAX_LEN)

    def by_layers(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """By weights that mean the same."""
        model, attention = self._model(self._step.config, dtype), TorchAttention(self._cache(dtype))
        if self._weights != PLAIN:
            copy_meaning(model, self._quantized_model())
        found = []
        for rows in STEPS:
            positions = self._step.positions[rows]
            inputs = TokenInputs(self._step.token_ids[rows], positions, positions + 1)
            mixer = StepMixer(attention.decode(self._rows(rows)))
            found.append(model.compute_logits(model.forward(inputs, mixer)))
        return found

    def flags(self) -> Definitions:
        model, num_ranks = self._model(self._step.config, torch.bfloat16), self._mesh.config.tp
        sizes = DenseShape.of(self._step.config).share(num_ranks)
        shape = sizes, model.attention_layers, torch.bfloat16, BLOCK_SIZE
        flags = definitions(*shape, NUM_BLOCKS, self._weights, num_ranks)
        assert flags is not None and f"-DRANKS={num_ranks}" in flags
        return flags

    def persistent(self, host: Host) -> PersistentDecode:
        if self._weights == PLAIN:
            model = self._model(self._step.config, torch.bfloat16)
        else:
            model = in_words(self._quantized_model())
        rank, cache = self._mesh.config.rank, self._cache(torch.bfloat16)
        self._caches.append(cache)
        return PersistentDecode(model, cache, host.launch(rank), NUM_BLOCKS, host.words(rank))

    def logits(self, decode: PersistentDecode, rows: slice) -> torch.Tensor:
        positions = self._step.positions[rows]
        return decode.forward(self._step.token_ids[rows], self._rows(rows), positions + 1)


def make_rank(step: Case, mesh: ThreadMesh, weights: str = PLAIN) -> Rank:
    return Rank(step, weights, RankMesh(mesh.config, mesh._program))


def make_host(step: Case, num_ranks: int, kernel: Launch, num_here: int = 0) -> Host:
    num_bytes = shared_bytes(step.kernel_model(), MeshConfig(num_ranks))
    return Host(num_ranks, num_bytes, kernel, num_here)


def flags_of(step: Case, num_ranks: int, weights: str = PLAIN) -> Definitions:
    return Rank(step, weights, Alone(MeshConfig(num_ranks))).flags()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "weights"), [(2, PLAIN), (2, "INT4"), (4, PLAIN)])
def test_equals_the_layers_on_ranks(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path, num_ranks: int, weights: str
) -> None:
    step = case(CONFIGS[num_ranks], tmp_path, POSITIONS)
    host = make_host(step, num_ranks, compiled(flags_of(step, num_ranks, weights)))

    def run(mesh: ThreadMesh) -> tuple[list[torch.Tensor], ...]:
        rank = make_rank(step, mesh, weights)
        exact, layers = rank.by_layers(torch.float32), rank.by_layers(torch.bfloat16)
        decode = rank.persistent(host)
        ours = [rank.logits(decode, rows) for rows in STEPS]
        assert not decode._words[-1]
        return exact, layers, ours

    first, *others = on_ranks(num_ranks, run)
    if weights == PLAIN:
        whole, _ = step.by_layers(torch.float32)
        assert distance(first[0][0], whole) < 1e-4 * whole.norm()
    for exact, layers, ours in zip(*first, strict=True):
        assert distance(ours, exact) <= 1.2 * distance(layers, exact)
        assert distance(layers, exact) < 0.05 * exact.double().norm()
    for _, _, ours in others:
        assert all(map(torch.equal, ours, first[2]))
    assert torch.equal(first[2][0], first[2][-1])  # of the other set
    assert all((memory == -1).all() for memory in host.memories)


@pytest.mark.slow
def test_a_step_that_waits_in_vain_fails_its_rows_and_no_later_one(
    compiled: Callable[[tuple[str, ...]], Any], tmp_path: Path
) -> None:
    step = case(CONFIGS[2], tmp_path, [90, 4])
    flags = flags_of(step, 2)
    host = make_host(step, 2, compile_impatient(tmp_path, flags))
    fresh = make_host(step, 2, compiled(flags))

    def run(mesh: ThreadMesh) -> None:
        rank, rows = make_rank(step, mesh), slice(0, 2)
        decode = rank.persistent(host)
        assert rank.logits(decode, rows).isnan().any(dim=1).all()
        assert decode._words[-1]
        host.kernel = fresh.kernel  # every rank has run the other one
        expected = rank.logits(rank.persistent(fresh), rows)
        for _ in range(2):
            assert torch.equal(rank.logits(decode, rows), expected)

    on_ranks(2, run)


@pytest.mark.slow
def test_waiting_ends_when_another_rank_is_gone(tmp_path: Path) -> None:
    step = case(CONFIGS[2], tmp_path, [90, 4])
    flags = flags_of(step, 2)
    kernel = compile_impatient(tmp_path, flags, "LOOK_POLLS = 1 << 14", 16)
    host = make_host(step, 2, kernel, num_here=1)
    host.closed.fill_(1)
    rank = Rank(step, PLAIN, LoneMesh(MeshConfig(2, 1), cast(Any, None)))
    with torch.inference_mode():
        assert rank.logits(rank.persistent(host), slice(0, 2)).isnan().any(dim=1).all()


@pytest.mark.parametrize("ranks_with_it", [(), (1,), (0, 1)])
def test_all_ranks_have_it_or_none(tmp_path: Path, ranks_with_it: tuple[int, ...]) -> None:
    """The mesh has no memory for them, so in the end none has."""
    step = case(CONFIGS[2], tmp_path, [1])
    model, asked = step.kernel_model(), []

    class Asked(ThreadMesh):
        def share_words(self, num_bytes: int) -> None:
            asked.append(num_bytes)

    def run(mesh: ThreadMesh) -> Any:
        launch: Any = len if mesh.config.rank in ranks_with_it else None
        none: Any = None
        return persistent_step(none, model, none, launch, Asked(mesh.config, mesh._program))

    assert on_ranks(2, run) == [None, None]
    assert asked == ([2 * 2 * 2 * 2 * 8 * 256 * 2] * 2 if len(ranks_with_it) == 2 else [])
