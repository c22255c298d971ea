"""Quantised weights that ranks share, as they are packed: the logits of the same on one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from asyncllm.errors import ModelLoadError
from asyncllm.mesh_config import MeshConfig
from asyncllm.model_config import Quantization
from asyncllm.models.loader import load_weights, open_checkpoint
from asyncllm.models.parallel.mesh import Alone
from asyncllm.models.quantization.online import SCHEMES
from tests.engine.test_quantized_experts import (
    GPT_OSS,
    MIXTURE,
    SERVED,
    write_gpt_oss,
    write_mixture,
)
from tests.models.quantized_files import FORMATS, Format, write_checkpoint
from tests.models.tiny_checkpoints import llama, random_reference
from tests.parallel.test_shards import build, expect_equal, expect_equal_engines

# What ranks of a group cannot have a part of, and why.
REFUSED = {
    "gptq-order": "columns in an order",
    "ct-pack-4-order": "columns in an order",
    "bnb-nf4": "32 of its 64 columns each, which groups of 64 do not divide",
    "bnb-nf4-nested": "32 of its 64 columns each, which groups of 64 do not divide",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_are_sliced_as_they_are(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        write_checkpoint(FORMATS[name], tmp_path)
    if FORMATS[name].activations is not None:
        pytest.skip("each rank scales its own part of a token: TOLERANCE does not hold")
    if name in REFUSED:
        with pytest.raises(ModelLoadError, match=REFUSED[name]):
            expect_equal(tmp_path, 2)
        return
    expect_equal(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in REFUSED])
def test_ranks_read_no_codes_but_their_own(name: str, tmp_path: Path) -> None:
    """Together they read each tensor of codes once; of scales, which are few, all of them."""
    with torch.inference_mode():
        write_checkpoint(FORMATS[name], tmp_path)
    assert codes_read(tmp_path, 2) == codes_read(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in REFUSED])
def test_dummy_weights_have_the_same_parts(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        write_checkpoint(FORMATS[name], tmp_path)
        model = build(tmp_path, Alone(MeshConfig(2, rank=1)))
        load_weights(model, tmp_path, "dummy", seed=0, progress=False)


@pytest.mark.parametrize("quantization", SCHEMES)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_ranks_quantise_what_is_theirs(
    quantization: Quantization, is_mixture: bool, tmp_path: Path
) -> None:
    """Where a scale is a whole row's, a rank with columns of it needs all of them."""
    family = Qwen3MoeConfig(**MIXTURE.to_dict() | {"moe_intermediate_size": 256, "head_dim": 64})
    config: PretrainedConfig = (
        family
        if is_mixture
        else llama(
            hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2
        )
    )
    with torch.inference_mode():
        random_reference(config).save_pretrained(tmp_path)
    alone, of_two = (codes_read(tmp_path, size, quantization) for size in (1, 2))
    by_columns = {name for name in alone if "o_proj" in name or "down_proj" in name}
    assert by_columns
    for name, count in alone.items():
        is_twice = quantization != "int4" and name in by_columns
        assert of_two[name] == count * (2 if is_twice else 1), name


def codes_read(
    folder: Path, num_ranks: int, quantization: Quantization | None = None
) -> dict[str, int]:
    """The numbers of the files' matrices of layers that ranks read, of all ranks together."""
    counts: dict[str, int] = {}
    checkpoint = open_checkpoint(folder)
    for rank in range(num_ranks):
        for load in build(folder, Alone(MeshConfig(num_ranks, rank)), quantization).loads():
            shape = checkpoint.header(load.name)[0]
            if "_proj" in load.name and "scale" not in load.name and "zero" not in load.name:
                parts = zip_longest(shape, load.part, fillvalue=slice(None))
                read = math.prod(len(range(size)[part]) for size, part in parts)
                counts[load.name] = counts.get(load.name, 0) + read
    return {name: counts[name] for name in counts if len(checkpoint.header(name)[0]) == 2}


BY = pytest.mark.parametrize("by_expert", [False, True], ids=["by size", "by number"])


def without_activations(form: Format) -> Format:
    """Where a format quantises activations too, experts alone have it: their inputs are not."""
    if form.activations is None:
        return form
    left = {"modules_to_not_convert": ["self_attn"], "ignore": ["lm_head", "self_attn"]}
    config = {**form.quantization_config, **left}
    return replace(form, ignored=("self_attn",), quantization_config=config)


@pytest.mark.slow
@BY
@pytest.mark.parametrize("name", SERVED)
def test_quantised_experts(name: str, by_expert: bool, tmp_path: Path) -> None:
    with torch.inference_mode():
        write_mixture(without_activations(FORMATS[name]), tmp_path)
    expect_equal(tmp_path, 2, by_expert)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_quantised_experts_of_two_engines(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        write_mixture(without_activations(FORMATS[name]), tmp_path)
    expect_equal_engines(tmp_path, 2, 1)


@BY
def test_gpt_oss_as_it_is_published(by_expert: bool, tmp_path: Path) -> None:
    """All of a layer's experts in one tensor, of which a rank reads its own alone."""
    with torch.inference_mode():
        write_gpt_oss(tmp_path, intermediate_size=128)
    expect_equal(tmp_path, 2, by_expert)


@pytest.mark.slow
@BY
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("quantization", SCHEMES)
def test_experts_that_are_quantised_while_they_load(
    quantization: Quantization,
    is_stacked: bool,
    by_expert: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme = replace(SCHEMES[quantization], activations=None)  # of attention, as above
    monkeypatch.setitem(SCHEMES, quantization, scheme)
    config: PretrainedConfig = MIXTURE
    if is_stacked:
        config = GptOssConfig(
            **GPT_OSS | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
        )
    else:
        config = Qwen3MoeConfig(
            **MIXTURE.to_dict() | {"moe_intermediate_size": 256, "head_dim": 64}
        )
    with torch.inference_mode():
        random_reference(config).save_pretrained(tmp_path)
    expect_equal(tmp_path, 2, by_expert, quantization=quantization)


@pytest.mark.parametrize("by_expert", [False, True])
def test_ranks_read_no_experts_but_their_own(by_expert: bool, tmp_path: Path) -> None:
    """Together they have each number once: of rows and columns, or of experts."""
    with torch.inference_mode():
        write_gpt_oss(tmp_path, intermediate_size=128)

    def num_bytes(mesh: Alone) -> int:
        return sum(x.num_bytes for x in build(tmp_path, mesh).loads() if ".experts." in x.name)

    of_ranks = [Alone(MeshConfig(2, rank, by_expert)) for rank in range(2)]
    of_engines = [Alone(MeshConfig(1, 0, True, dp=2, engine=engine)) for engine in range(2)]
    for meshes in (of_ranks, of_engines):
        assert sum(map(num_bytes, meshes)) == num_bytes(Alone())


def test_a_size_that_cuts_a_group_is_refused_by_name(tmp_path: Path) -> None:
    with torch.inference_mode():
        write_gpt_oss(tmp_path)
    complaint = "experts: down_proj: ranks have 48 of its 96 columns each, which groups of 32"
    with pytest.raises(ModelLoadError, match=complaint):
        list(build(tmp_path, Alone(MeshConfig(2))).loads())
