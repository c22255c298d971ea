"""transformers' own model code over our pages gives what transformers gives, or is refused.

scripts/model_matrix.py does the same for every class; here are families of different kinds, and the
native families by both implementations.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FalconConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from asyncllm.commands import doctor
from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import CausalLM
from asyncllm.models.checkpoint import SINGLE_FILE
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import load_weights
from asyncllm.models.registry import build_model, settle
from asyncllm.models.transformers_backend import TransformersModel
from asyncllm.models.transformers_build import _parameters_on_meta
from asyncllm.models.transformers_modules import FUSED
from asyncllm.models.transformers_rope import StepRotary
from tests.engine.test_against_transformers import (
    LOGPROB_TOLERANCE,
    REGIMES,
    Reference,
    run_engine,
)
from tests.models.tiny_checkpoints import CONFIGS, random_reference
from tests.script_module import import_script

SCRIPTS = Path(__file__).parents[2] / "scripts"
matrix = import_script(SCRIPTS / "model_matrix.py")
configs = import_script(SCRIPTS / "tiny_configs.py")
CPU = torch.device("cpu")
BACKEND = "transformers"
GELU_LLAMA = configs.small_config("LlamaForCausalLM", {"hidden_act": "gelu"})
FAMILIES = (
    "BartForCausalLM",  # counts its positions itself
    "Cohere2ForCausalLM",  # a logit scale, layers without positions, windows
    "DeepseekV3ForCausalLM",  # latent attention, whose V is smaller than K; grouped experts
    "DiffLlamaForCausalLM",  # two attention calls in a layer
    "FalconForCausalLM",  # attention that predates the library's functions
    "GPTNeoXForCausalLM",  # partial rotary, merged q, k and v
    "Gemma2ForCausalLM",  # soft caps of scores and logits
    "Gemma3ForCausalLM",  # rotary by the kind of layer, windows
    "Gemma3ForConditionalGeneration",  # its text tower
    "Glm4ForCausalLM",
    "GptOssForCausalLM",  # sinks, windows, experts with biases
    "GraniteForCausalLM",  # multipliers
    "MiniMaxForCausalLM",  # a scan without a name of its own
    "MixtralForCausalLM",  # experts, a tensor each in the file
    "Olmo2ForCausalLM",  # norms behind the layers
    "Phi3ForCausalLM",  # merged projections
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForCausalLM",  # heads of queries between their gates
    "StableLmForCausalLM",  # drops the arguments of attention
    "Starcoder2ForCausalLM",
    "ZambaForCausalLM",  # layers that share their weights
    "ZayaForCausalLM",  # convolved queries and keys, delayed values
)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_equal_transformers(architecture: str, tmp_path: Path) -> None:
    """Batched, chunked, with prefix hits and preemption."""
    torch.set_num_threads(1)
    config = configs.tiny_config(architecture)
    assert matrix.compare(architecture, config, tmp_path, model_impl=BACKEND) < matrix.TOLERANCE


@pytest.mark.parametrize("multi_query", [False, True])
def test_falcon_with_alibi_equals_transformers(
    multi_query: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sdpa, the library's default: its eager code adds the biases twice."""

    def by_sdpa(config: Any, architecture: str) -> Any:
        model = configs.random_model(config, architecture)
        model.config._attn_implementation = "sdpa"
        return model

    torch.set_num_threads(1)
    monkeypatch.setattr(matrix, "random_model", by_sdpa)
    config = FalconConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=True,
        new_decoder_architecture=False, multi_query=multi_query, parallel_attn=False, bias=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    assert matrix.compare("FalconForCausalLM", config, tmp_path) < matrix.TOLERANCE


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return cache(lambda name: Reference(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(
    ("name", "regime"),
    [
        *((name, "chunked-recompute") for name in CONFIGS),
        *(("llama", regime) for regime in REGIMES if regime != "chunked-recompute"),
    ],
)
def test_native_families_by_the_backend_are_the_same(
    name: str, regime: str, reference: Any
) -> None:
    expected: Reference = reference(name)
    settings = REGIMES[regime] | {"model_impl": "transformers"}
    outputs, stats = asyncio.run(run_engine(expected, settings))
    for output, tokens, logprobs in zip(outputs, expected.tokens, expected.logprobs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == tokens and completion.logprobs is not None
        ours = [
            entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)
        ]
        assert ours == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)
    if "recompute" in regime:
        assert stats.num_preemptions_recompute > 0
    if regime in ("batched", "chunked"):
        assert stats.prefix_cache_hits > 0


def write(folder: Path, architecture: str, **changes: Any) -> Path:
    config = configs.small_config(architecture, {}).to_dict()
    content = config | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def build(folder: Path, max_model_len: int = 60) -> CausalLM:
    config = ModelConfig.from_folder(folder, "transformers")
    return build_model(config, torch.float32, CPU, TorchOps(), max_model_len)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("RwkvForCausalLM", {}, ["'RwkvForCausalLM'", "recurrent layers of its own kind"]),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}, ["'awq'"]),
        ("DogeForCausalLM", {}, ["'DogeForCausalLM'", "what it makes of values"]),
        ("BloomForCausalLM", {}, ["max_position_embeddings"]),
        ("RemBertForCausalLM", {"is_decoder": False}, ["'RemBertForCausalLM'", "is_decoder False"]),
        ("Gemma2ForCausalLM", {"model_type": "llama"}, ["does not fit model_type 'llama'"]),
    ],
)  # fmt: skip
def test_what_would_not_be_exact_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], words: list[str]
) -> None:
    write(tmp_path, architecture, **changes)
    with pytest.raises(ModelLoadError) as error:
        build(tmp_path)
    for word in (tmp_path / "config.json", *words):
        assert str(word) in str(error.value)
    assert "\n" not in str(error.value)


def test_longrope_goes_by_each_sequence(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    write(tmp_path, "Phi3ForCausalLM", **changes)
    assert not build(tmp_path, 32).uses_prompt_lens
    config = ModelConfig.from_folder(tmp_path, "transformers").hf_config
    module = Phi3RotaryEmbedding(config)
    ours = StepRotary(Phi3RotaryEmbedding(config), None, 50)
    assert ours.uses_prompt_lens
    positions = torch.tensor([5, 31, 5, 40], dtype=torch.int32)
    rotation = ours.rotation(positions, torch.tensor([9, 20, 33, 20], dtype=torch.int32))
    assert rotation.rows.dtype is torch.int32
    for row, (position, length) in enumerate(zip(positions, (9, 32, 33, 41), strict=True)):
        expected = module(torch.zeros(1), torch.tensor([[position, length - 1]]))
        for given, wanted in zip(ours.as_module(rotation, torch.float32), expected, strict=True):
            assert torch.equal(given[0, row], wanted[0, 0])


def fused(model: CausalLM) -> Counter[str]:
    assert isinstance(model, TransformersModel)
    modules = model._model.modules()
    return Counter(type(vars(m)[FUSED]).__name__ for m in modules if FUSED in vars(m))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        # three layers, and the head
        (
            "LlamaForCausalLM",
            {"ProjectedAttention": 3, "GatedMLP": 3, "ByNorm": 7, "Product": 7 + 6 + 9},
        ),
        ("Qwen3ForCausalLM", {"ProjectedAttention": 3, "GatedMLP": 3, "ByNorm": 13}),
        ("Phi3ForCausalLM", {"ProjectedAttention": 3, "GatedMLP": 3, "ByNorm": 7}),
        ("Gemma2ForCausalLM", {"ProjectedAttention": 3, "partial": 6, "ByNorm": 13}),
        ("GraniteForCausalLM", {"ProjectedAttention": 3, "GatedMLP": 3, "ByNorm": 7}),
        ("Olmo2ForCausalLM", {"partial": 9, "GatedMLP": 3, "ByNorm": 13}),
    ],
)
def test_kernels_do_what_is_proved(
    architecture: str, expected: dict[str, int], tmp_path: Path
) -> None:
    write(tmp_path, architecture)
    found = fused(build(tmp_path))
    print(found)
    assert expected.items() <= found.items()


def test_windows_of_the_masks_and_pages_of_one_shape(tmp_path: Path) -> None:
    write(tmp_path, "Gemma3ForCausalLM", layer_types=["sliding_attention"] * 2 + ["full_attention"])
    assert [layer.window for layer in build(tmp_path).attention_layers] == [8, 8, None]
    assert [layer.window for layer in build(tmp_path, 8).attention_layers] == [None] * 3
    write(tmp_path, "DeepseekV3ForCausalLM")
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in build(tmp_path).attention_layers}
    assert shapes == {(4, 12)}  # 8 and 4 rotated dimensions; V has 8


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path) -> None:
    config = configs.tiny_config("MixtralForCausalLM")
    configs.random_model(config, "MixtralForCausalLM").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    expert = next(name for name in tensors if ".experts.1." in name)
    for changed, words in (
        ({n: t for n, t in tensors.items() if n != expert}, "3 of 4"),
        ({n: t for n, t in tensors.items() if n != "model.norm.weight"}, "model.norm.weight"),
        (tensors | {"model.layers.0.extra": torch.zeros(2)}, "unexpected tensors.*extra"),
    ):
        save_file(changed, tmp_path / SINGLE_FILE)
        with pytest.raises(ModelLoadError, match=words):
            load_weights(build(tmp_path), tmp_path, "auto", seed=0, progress=False)


def test_tied_weights_are_one(tmp_path: Path) -> None:
    random_reference(CONFIGS["llama-tied"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": copy}, tmp_path / SINGLE_FILE)
    model = build(tmp_path)
    load_weights(model, tmp_path, "auto", seed=0, progress=False)
    assert "lm_head.weight" in model.aliases
    save_file(tensors | {"lm_head.weight": copy + 1}, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match="ties it"):
        load_weights(build(tmp_path), tmp_path, "auto", seed=0, progress=False)


def test_doctor_names_the_implementation(tmp_path: Path) -> None:
    for architecture, flag, expected in (
        ("Starcoder2ForCausalLM", "auto", "transformers"),
        ("LlamaForCausalLM", "auto", "asyncllm"),
        ("LlamaForCausalLM", "transformers", "transformers"),
    ):
        write(tmp_path, architecture)
        args = EngineArgs(str(tmp_path), model_impl=flag)  # type: ignore[arg-type]
        found = {f.name: f.value for f in doctor.examine(args) if f.section == "model"}
        assert found["implementation"] == expected


def test_what_asyncllm_has_not_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "Starcoder2ForCausalLM")
    with pytest.raises(ModelLoadError, match="'Starcoder2ForCausalLM' is not supported"):
        EngineArgs(str(tmp_path), model_impl="asyncllm").create_engine_config()


@pytest.mark.slow
def test_what_a_native_family_does_not_serve_falls_back(tmp_path: Path) -> None:
    """With its reason in the log and in doctor; refused where ours is asked for."""
    configs.random_model(GELU_LLAMA, "LlamaForCausalLM").save_pretrained(tmp_path)
    difference = matrix.compare("LlamaForCausalLM", GELU_LLAMA, tmp_path)
    assert difference < matrix.TOLERANCE
    found = {f.name: f for f in doctor.examine(EngineArgs(str(tmp_path))) if f.section == "model"}
    assert found["implementation"].value == "transformers"
    assert "hidden_act 'gelu'" in found["implementation"].advice
    asked = EngineArgs(str(tmp_path), model_impl="asyncllm")
    findings = [f for f in doctor.examine(asked) if f.section == "model"]
    with pytest.raises(ModelLoadError, match="hidden_act 'gelu' is not supported") as error:
        settle(asked.create_engine_config())
    assert [(f.state, f.value) for f in findings] == [("MISSING", str(error.value))]


def test_modules_of_another_thread_have_memory() -> None:
    """An application may build its own while an engine starts."""
    with _parameters_on_meta():
        with ThreadPoolExecutor(1) as thread:
            theirs = thread.submit(torch.nn.Linear, 2, 2).result()
        ours = torch.nn.Linear(2, 2)
    assert theirs.weight.device.type == "cpu" and ours.weight.device.type == "meta"
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
