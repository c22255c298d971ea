"""Models that ranks share give the logits of the same model on one rank, and read no more of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import ModelConfig, ModelImplementation, Quantization
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.layers.ops import SILU, ExpertRange, ExpertWeights, Routed
from asyncllm.models.layers.torch_ops import TorchOps, grouped_experts
from asyncllm.models.loader import load_weights
from asyncllm.models.parallel.mesh import Alone, Mesh
from asyncllm.models.parallel.stages import Stages
from asyncllm.models.registry import build_model
from asyncllm.types import PADDING_SLOT
from tests.models.dense_sequence import DenseSequence
from tests.models.tiny_checkpoints import CONFIGS, CPU, VOCAB_SIZE, WINDOW, llama, random_reference
from tests.parallel.thread_mesh import ThreadMesh, on_ranks

TOLERANCE = 1e-4
NUM_TOKENS = 24
WITH_EXPERTS = [name for name, config in CONFIGS.items() if "experts" in str(config.to_dict())]


ONE_BUILDS = threading.Lock()  # ranks here are threads, transformers' models are built by one


def build(
    folder: Path,
    mesh: Mesh,
    quantization: Quantization | None = None,
    implementation: ModelImplementation = "auto",
) -> CausalLM:
    found = ModelConfig.from_folder(folder, implementation)
    config = replace(found, quantization=quantization)
    with ONE_BUILDS:
        return build_model(config, torch.float32, CPU, TorchOps(), WINDOW, mesh=mesh)


def logits_of(folder: Path, mesh: Mesh, token_ids: torch.Tensor, **how: Any) -> torch.Tensor:
    """In two chunks and single tokens."""
    model = build(folder, mesh, **how)
    load_weights(model, folder, "auto", seed=0, progress=False)
    stages = None
    if mesh.config.pp > 1:
        assert isinstance(model, DenseDecoder)
        stages = Stages(model, mesh, NUM_TOKENS)
    sequence = DenseSequence(model, 20, stages)
    pieces = [token_ids[:13], token_ids[13:20], *token_ids[20:].split(1)]
    return torch.cat([sequence.logits(piece) for piece in pieces])


def expect_equal(
    folder: Path,
    num_ranks: int,
    by_expert: bool = False,
    num_stages: int = 1,
    **how: Any,
) -> None:
    """how: as `build`."""
    token_ids = torch.arange(NUM_TOKENS) * 41 % VOCAB_SIZE
    with torch.inference_mode():
        expected = logits_of(folder, Alone(), token_ids, **how)

    def on_rank(mesh: ThreadMesh) -> torch.Tensor:
        return logits_of(folder, mesh, token_ids, **how)

    of_ranks = on_ranks(num_ranks, on_rank, by_expert, num_stages)
    for logits in of_ranks[:num_ranks]:  # the first stage's
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    with torch.inference_mode():
        random_reference(CONFIGS[request.param]).save_pretrained(folder)
    return folder


def test_each_family_on_two_ranks(family: Path) -> None:
    expect_equal(family, 2)


@pytest.mark.slow
def test_each_family_on_four_ranks_some_of_which_have_the_same_kv_head(family: Path) -> None:
    if family.name.startswith("gpt-oss"):
        pytest.skip("is refused, below")
    expect_equal(family, 4)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "olmo2", "deepseek-v2", "llama-dynamic"])
def test_stages_of_one_or_two_ranks(name: str, num_ranks: int, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    expect_equal(tmp_path, num_ranks, num_stages=2)
    expect_equal(tmp_path, num_ranks, num_stages=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_by_number(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    expect_equal(tmp_path, 2, by_expert=True)


def token_ids_of(engine: int) -> torch.Tensor:
    return (torch.arange(NUM_TOKENS) + engine) * (41 + 2 * engine) % VOCAB_SIZE


def expect_equal_engines(folder: Path, num_engines: int, num_ranks: int, **how: Any) -> None:
    """Each has its own tokens, as many at a time as the others."""

    def on_rank(mesh: ThreadMesh) -> torch.Tensor:
        return logits_of(folder, mesh, token_ids_of(mesh.config.engine), **how)

    found = on_ranks(num_ranks, on_rank, by_expert=True, num_engines=num_engines)
    for engine in range(num_engines):
        with torch.inference_mode():
            expected = logits_of(folder, Alone(), token_ids_of(engine), **how)
        for logits in found[engine * num_ranks : (engine + 1) * num_ranks]:
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_of_several_engines(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    expect_equal_engines(tmp_path, 2, 1)
    expect_equal_engines(tmp_path, 2 if name == "mixtral" else 3, 2)


def test_padding_takes_no_experts(tmp_path: Path) -> None:
    """The last token is padding; none of the others attends to it."""
    with torch.inference_mode():
        random_reference(CONFIGS["mixtral"]).save_pretrained(tmp_path)

    def on_rank(mesh: ThreadMesh, padding: int) -> torch.Tensor:
        model = build(tmp_path, mesh)
        load_weights(model, tmp_path, "auto", seed=0, progress=False)
        slots = torch.full((9,), 1 + mesh.config.engine, dtype=torch.int32)
        slots[9 - padding :] = PADDING_SLOT
        with mesh.rows_of(slots):
            return DenseSequence(model, 9).logits(token_ids_of(mesh.config.engine)[:9])

    works = (partial(on_rank, padding=number) for number in (0, 1))
    plain, padded = (on_ranks(1, work, by_expert=True, num_engines=2) for work in works)
    for ours, exact in zip(padded, plain, strict=True):
        torch.testing.assert_close(ours[:-1], exact[:-1], atol=TOLERANCE, rtol=0)
        assert (ours[-1] - exact[-1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 50])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_rank_adds_up_its_own_experts_alone(num_tokens: int, top_k: int, num_ranks: int) -> None:
    """A rank that has none of a token's gives zeros, whatever products leave in its rows."""
    torch.manual_seed(top_k)
    gates, ids = torch.rand(num_tokens, 8).topk(top_k)
    x, gate_up, down = torch.rand(num_tokens, 16), torch.rand(8, 16, 16), torch.rand(8, 16, 8)
    biases = torch.rand(8, 16), torch.rand(8, 16)
    whole = grouped_experts(x, ExpertWeights(gate_up, down, *biases, SILU), Routed(ids, gates))
    summed = torch.zeros_like(whole)
    for rank in range(num_ranks):
        own = MeshConfig(num_ranks, rank).expert_share(8)
        weights = ExpertWeights(gate_up[own], down[own], *(bias[own] for bias in biases), SILU)
        routed = Routed(ids, gates, ExpertRange(own.start, 8))
        part = grouped_experts(x, weights, routed)
        has_none = ((ids < own.start) | (ids >= own.stop)).all(dim=1)
        assert not part[has_none].any()
        summed += part
    torch.testing.assert_close(summed, whole)


@pytest.mark.parametrize(
    ("config", "num_ranks", "by_expert", "complaint"),
    [
        (llama(), 3, False, "tensor_parallel_size 3 does not divide num_attention_heads 4"),
        (
            llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48),
            2,
            False,
            "tensor_parallel_size 2 does not divide num_key_value_heads 3",
        ),
        (
            llama(num_attention_heads=12, num_key_value_heads=3, hidden_size=48),
            4,
            False,
            "tensor_parallel_size 4 is no multiple of num_key_value_heads 3",
        ),
        (
            llama(intermediate_size=50),
            4,
            False,
            "tensor_parallel_size 4 does not divide the feed-forward's size at .* 50",
        ),
        (CONFIGS["gpt-oss"], 4, False, "experts of size 24 rows of 6, which are no multiple of 16"),
        (CONFIGS["qwen3-moe"], 4, True, "tensor_parallel_size 4 does not divide the number of"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    config: PretrainedConfig, num_ranks: int, by_expert: bool, complaint: str, tmp_path: Path
) -> None:
    with torch.inference_mode():
        random_reference(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=complaint):
        build(tmp_path, Alone(MeshConfig(num_ranks, 0, by_expert)))


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_stages_have_all_of_the_weights_once(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    whole = {load.name: load.num_bytes for load in build(tmp_path, Alone()).loads()}
    meshes = [MeshConfig(pp=3, rank=rank) for rank in range(3)]
    stages = [load for mesh in meshes for load in build(tmp_path, Alone(mesh)).loads()]
    assert {load.name: load.num_bytes for load in stages} == whole
    assert len(stages) == len(whole)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_ranks_have_all_of_the_weights_and_no_more(name: str, tmp_path: Path) -> None:
    """But for norms, routers and latents' projections, which each has whole."""
    with torch.inference_mode():
        random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    whole = {load.name: load.num_bytes for load in build(tmp_path, Alone()).loads()}
    shares: dict[str, int] = dict.fromkeys(whole, 0)
    for rank in range(2):
        for load in build(tmp_path, Alone(MeshConfig(2, rank))).loads():
            shares[load.name] += load.num_bytes
    for tensor, num_bytes in shares.items():
        is_whole = "norm" in tensor or ".gate." in tensor or "_a_proj" in tensor
        is_whole |= "router" in tensor or "correction_bias" in tensor
        assert num_bytes == whole[tensor] * (2 if is_whole else 1), tensor
