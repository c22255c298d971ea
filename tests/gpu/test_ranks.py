"""All that one GPU can say of ranks: shards by the kernels of a GPU, and NCCL calls in a graph."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig
from asyncllm.models.loader import load_weights
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.models.parallel.mesh import Alone, Mesh
from asyncllm.models.parallel.stores import open_store
from asyncllm.models.registry import build_model
from asyncllm.worker.kernels import select_ops
from asyncllm.worker.memory import forward_without_attention
from tests.models.tiny_checkpoints import CONFIGS, random_reference
from tests.parallel.thread_mesh import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
NUM_TOKENS = (1, 3, 40)
TOLERANCE = 0.05  # of the largest logit, in bfloat16


def logits_of(folder: Path, mesh: Mesh) -> list[torch.Tensor]:
    """Hidden states by an attention that gives zeros: all of the layers' kernels but that."""
    config, ops = ModelConfig.from_folder(folder), select_ops(CUDA, torch.bfloat16, set())
    model = build_model(config, torch.bfloat16, CUDA, ops, 64, mesh=mesh)
    load_weights(model, folder, "auto", seed=0, progress=False)
    hidden = [forward_without_attention(model, size, CUDA) for size in NUM_TOKENS]
    return [model.compute_logits(each).float() for each in hidden]


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "gemma3"])
def test_shards_give_the_logits_of_one_rank(name: str, by_expert: bool, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
        expected = logits_of(tmp_path, Alone())
    for found in on_ranks(2, lambda mesh: logits_of(tmp_path, mesh), by_expert):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_experts_of_several_engines(name: str, num_ranks: int, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
        expected = logits_of(tmp_path, Alone())
    num_engines = 2 if name == "mixtral" else 3
    of_ranks = on_ranks(
        num_ranks, lambda mesh: logits_of(tmp_path, mesh), True, num_engines=num_engines
    )
    for found in of_ranks:
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()


@torch.inference_mode()
def test_calls_of_nccl_are_captured() -> None:
    store = open_store(1, socket.create_server(("127.0.0.1", 0)))
    mesh = CollectiveMesh(MeshConfig(), store, "127.0.0.1", CUDA)
    x, stream = torch.ones(4, 8, device=CUDA), torch.cuda.Stream()
    tokens = torch.zeros(4, dtype=torch.int32, device=CUDA)
    rows, gates = torch.ones(4, 8, dtype=torch.bfloat16, device=CUDA), torch.ones(4, 2, device=CUDA)
    for _ in range(2):  # NCCL connects at the first calls
        mesh.sum_rows(mesh.gather_rows(rows, tokens[:, None], gates)[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        gathered = mesh.gather(mesh.reduce(x.add_(1)))
        mesh.broadcast(tokens.add_(1))
        values, ids, weights = mesh.gather_rows(rows.add_(1), tokens[:, None], gates.add_(1))
        summed = mesh.sum_rows(values)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert gathered.tolist() == [[4.0] * 8] * 4 and tokens.tolist() == [3] * 4
    assert summed.tolist() == [[4.0] * 8] * 4 and summed.dtype is rows.dtype
    assert ids.tolist() == [[3]] * 4 and weights.tolist() == [[4.0] * 2] * 4
    mesh.close()
