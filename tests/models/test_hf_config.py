"""The fast path to a configuration gives what transformers' own classes give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from asyncllm.hf_config import DenseConfig, read_hf_config
from asyncllm.model_config import BUILTIN_MODELS
from tests.models.tiny_checkpoints import CONFIGS
from tests.waiting import PATIENCE_SECONDS

READ_KEYS = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "rms_norm_eps", "hidden_act", "eos_token_id", "tie_word_embeddings", "rope_parameters", "dtype",
)  # fmt: skip
FAMILY_KEYS = {  # that a family has, and its model reads
    "llama": ("head_dim", "attention_bias", "mlp_bias"),
    "mistral": ("head_dim", "sliding_window"),
    "qwen2": ("sliding_window", "layer_types"),
    "qwen3": ("head_dim", "attention_bias", "sliding_window", "layer_types"),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LLAMA_3_1: dict[str, Any] = {  # as published, before the library renamed keys
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}


def write(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(content))
    return content


def assert_equal(folder: Path, content: dict[str, Any]) -> None:
    ours = read_hf_config(folder, content)
    assert isinstance(ours, DenseConfig), "took the slow path"
    reference = AutoConfig.from_pretrained(folder)
    for key in (*READ_KEYS, *FAMILY_KEYS[content["model_type"]]):
        assert getattr(ours, key) == getattr(reference, key), key
    assert getattr(ours, "quantization_config", None) is None


DENSE = [name for name, config in CONFIGS.items() if config.model_type in ARCHITECTURES]


@pytest.mark.parametrize("name", DENSE)
def test_every_family_and_rope_variant(name: str, tmp_path: Path) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["architectures"] = [ARCHITECTURES[content["model_type"]]]
    assert_equal(tmp_path, write(tmp_path, content))


def test_as_published(tmp_path: Path) -> None:
    assert_equal(tmp_path, write(tmp_path, LLAMA_3_1))


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_built_in(name: str) -> None:
    folder = BUILTIN_MODELS[name]
    assert_equal(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("missing", ["num_key_value_heads", "rms_norm_eps", "eos_token_id"])
def test_missing_keys_take_the_librarys_defaults(missing: str, tmp_path: Path) -> None:
    content = write(tmp_path, {k: v for k, v in LLAMA_3_1.items() if k != missing})
    ours, reference = read_hf_config(tmp_path, content), AutoConfig.from_pretrained(tmp_path)
    assert getattr(ours, missing) == getattr(reference, missing)


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": 4095}, {"rms_norm_eps": "small"}, {"num_attention_heads": 33}]
)
def test_wrong_values_are_the_librarys_to_refuse(wrong: dict[str, Any], tmp_path: Path) -> None:
    content = write(tmp_path, LLAMA_3_1 | wrong)
    with pytest.raises(Exception) as reference:
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(type(reference.value)) as ours:
        read_hf_config(tmp_path, content)
    assert str(ours.value) == str(reference.value)


@pytest.mark.slow
def test_the_short_way_is_short() -> None:
    code = (
        "import sys; from asyncllm.model_config import ModelConfig, BUILTIN_MODELS; "
        "ModelConfig.from_folder(BUILTIN_MODELS['tiny']); "
        "heavy = {'torch._dynamo', 'torch.distributed.tensor', 'transformers.generation.utils', "
        "'transformers.modeling_utils', 'sympy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
