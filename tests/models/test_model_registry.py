"""Which models are built, which are refused and how, and that a forward pass never waits."""

import json
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, MambaConfig, Qwen2_5_VLConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES,
)

from asyncllm.attention.base import RotatedHeads, StepMixer
from asyncllm.attention.heads import rotated_heads
from asyncllm.commands import doctor
from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError, UnsupportedModelError
from asyncllm.model_config import ARCHITECTURES as SUPPORTED
from asyncllm.model_config import ModelConfig
from asyncllm.models.base import TokenInputs
from asyncllm.models.checkpoint import SINGLE_FILE, Checkpoint
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.registry import build_model, settle
from tests.models.tiny_checkpoints import CONFIGS, build, llama, random_reference, rope

META = torch.device("meta")
TOO_FEW = rope("longrope", factor=2.0, short_factor=[1.0] * 3, long_factor=[2.0] * 3)


def write_config(folder: Path, config, **changes) -> Path:
    config = config.to_dict() | {"architectures": [ARCHITECTURES[config.model_type]]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"architectures": ["T5Model"]}, ["T5Model", "LlamaForCausalLM", "Qwen3"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        (
            "qwen2",
            {"quantization_config": {"quant_method": "quark"}},
            ["quant_method", "quark", "awq"],
        ),
        ("qwen3", {"num_key_value_heads": 3}, ["num_attention_heads", "3"]),
        ("llama", TOO_FEW, ["rope_parameters", "longrope", "RuntimeError"]),
        ("llama", rope("proportional"), ["rope_parameters", "proportional", "yarn"]),
        ("qwen3-moe", {"num_experts_per_tok": 7}, ["num_experts_per_tok 7", "num_experts 6"]),
        ("qwen3-moe", {"moe_intermediate_size": 0}, ["moe_intermediate_size", "positive"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv 8.0", "None"]),
        ("llama", rope("default", partial_rotary_factor=0.5), ["partial_rotary_factor"]),
        ("llama", rope("llama3", factor=2.0), ["rope_parameters", "low_freq_factor"]),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, ["layer_types", "chunked_attention"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["sliding_window", "None"]),
        *(
            (name, {"sliding_window": window}, [f"sliding_window {window} must be a positive"])
            for name in ("mistral-window", "qwen3-windows", "phi3", "gemma3", "gpt-oss")
            for window in (0, -5)
        ),
        *(
            (name, {key: value}, [f"{key} {value!r} must be a positive number"])
            for name, key, values in (
                ("gemma2", "query_pre_attn_scalar", (0, -20)),
                ("granite", "logits_scaling", (0.0, -2.5, float("nan"))),
            )
            for value in values
        ),
    ],
)
def test_refusals_name_the_file_and_the_key(tmp_path, name, changes, words):
    write_config(tmp_path, CONFIGS[name], **changes)
    with pytest.raises(ModelLoadError) as error:
        build(tmp_path)
    for word in (tmp_path / "config.json", *words):
        assert str(word) in str(error.value)


def test_transformers_code_is_not_asked_about_a_window_that_is_none(tmp_path):
    """`start` leaves to it what our family does not serve exactly."""
    write_config(tmp_path, CONFIGS["mistral-window"], sliding_window=-5)
    with pytest.raises(ModelLoadError, match="sliding_window -5") as error:
        settle(EngineArgs(str(tmp_path), load_format="dummy").create_engine_config())
    assert not isinstance(error.value, UnsupportedModelError)


@pytest.mark.parametrize("config", [GPT2Config(), Qwen2_5_VLConfig()], ids=lambda c: c.model_type)
def test_other_architectures_are_refused_alike_by_serve_and_doctor(tmp_path, config):
    name = f"{type(config).__name__.removesuffix('Config')}ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    args = EngineArgs(str(tmp_path))
    with pytest.raises(ModelLoadError) as error:
        args.create_engine_config()
    for word in (tmp_path / "config.json", "architectures", repr(name), "LlamaForCausalLM"):
        assert str(word) in str(error.value)
    findings = [finding for finding in doctor.examine(args) if finding.section == "model"]
    assert [(finding.state, finding.value) for finding in findings] == [
        ("MISSING", str(error.value))
    ]


@pytest.mark.parametrize("config", [GPT2Config(), MambaConfig()], ids=lambda c: c.model_type)
def test_a_model_type_that_lacks_what_a_decoder_has_is_refused(tmp_path, config):
    content = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"config\.json: \w+ must be a positive integer, got"):
        ModelConfig.from_folder(tmp_path)


def test_every_supported_architecture_has_a_function_for_its_spec():
    assert {ARCHITECTURES[config.model_type] for config in CONFIGS.values()} == set(SUPPORTED)
    for module, function in SUPPORTED.values():
        assert callable(getattr(import_module(f"asyncllm.models.{module}"), function))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_absurdly_many_layers_are_refused_before_any_is_built(tmp_path, name):
    write_config(tmp_path, CONFIGS[name], num_hidden_layers=10**9, layer_types=None)
    with pytest.raises(
        ModelLoadError, match=r"config\.json: num_hidden_layers 1000000000 is above"
    ):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_more_layers_than_the_checkpoint_has_are_refused(tmp_path, max_shard_size):
    random_reference(CONFIGS["llama"]).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    write_config(tmp_path, CONFIGS["llama"], num_hidden_layers=9999)
    config = ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelLoadError, match=r"num_hidden_layers 9999 is more than the 3 of the"):
        build_model(config, torch.float32, META, TorchOps(), max_model_len=16)


@pytest.mark.parametrize("num_layers", [29, 9999])
def test_more_layers_than_the_checkpoint_has_tensors_are_refused(tmp_path, num_layers):
    """Models that transformers' code computes name their layers as they like."""
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=97)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)  # 2 * 12 tensors of layers, 2 * 2 others
    write_config(tmp_path, config, architectures=["GPT2LMHeadModel"], n_layer=num_layers)
    start = time.perf_counter()
    with pytest.raises(ModelLoadError, match=f"{num_layers} is more than the") as caught:
        build(tmp_path)
    assert "config.json: num_hidden_layers" in str(caught.value)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("number", [-1, 2.0, True, "1", [1]])
def test_a_number_of_draft_layers_that_is_none(tmp_path, number):
    write_config(tmp_path, CONFIGS["llama"], num_nextn_predict_layers=number)
    with pytest.raises(ModelLoadError) as error:
        build(tmp_path)
    assert f"config.json: num_nextn_predict_layers {number!r} must be" in str(error.value)


@pytest.mark.parametrize("number", [None, 0, 1, 10**30])
def test_draft_layers_that_the_configuration_counts_are_not_loaded(tmp_path, number):
    """However many it says, only names that are stored are looked at."""
    random_reference(CONFIGS["llama"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in (2, 3, 4)]
    save_file(tensors | {name: tensors[names[0]].clone() for name in names}, tmp_path / SINGLE_FILE)
    write_config(tmp_path, CONFIGS["llama"], num_nextn_predict_layers=number)
    assert set(build(tmp_path).aliases) == {*names[1 : 1 + min(number or 0, 2)]}


def test_layers_are_not_counted_where_no_checkpoint_can_be_read(tmp_path):
    write_config(tmp_path, CONFIGS["llama"])
    build(tmp_path)
    for text in ("", "no header"):
        (tmp_path / SINGLE_FILE).write_text(text)
        build(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": 3}, ["architectures"]),
        ({"architectures": [3]}, ["architectures"]),
        ({"hidden_size": "x"}, ["hidden_size", "'x'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings", "None"]),
        ({"max_position_embeddings": -5}, ["max_position_embeddings", "-5"]),
        ({"eos_token_id": "x"}, ["eos_token_id", "'x'"]),
        ({"model_type": "no_such_type"}, ["no_such_type"]),
        (rope("linear", factor="x"), ["rope_parameters", "factor", "'x'"]),
        (rope("linear", factor=-1.0), ["rope_parameters", "factor", "-1.0"]),
    ],
)
def test_values_that_are_none_name_the_file_and_the_key_in_one_line(tmp_path, changes, words):
    write_config(tmp_path, CONFIGS["llama"], **changes)
    with pytest.raises(ModelLoadError) as error:
        ModelConfig.from_folder(tmp_path)
    for word in (tmp_path / "config.json", *words):
        assert str(word) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, "\x00"])
def test_a_configuration_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json: ") as error:
        ModelConfig.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_rope_parameters_per_layer_type_are_refused(tmp_path):
    config = ModelConfig.from_folder(write_config(tmp_path, CONFIGS["qwen3"]))
    config.hf_config.rope_parameters = {"full_attention": rope("default")["rope_parameters"]}
    with pytest.raises(ModelLoadError, match="rope_parameters"):
        build_model(config, torch.float32, META, TorchOps(), max_model_len=16)


def test_old_style_rope_scaling_is_understood(tmp_path):
    config = CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]}
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = build(tmp_path).rotaries[0].rotation(torch.tensor([1]), None).cos_sin
    half = torch.tensor(5e5) ** (-torch.arange(0, 8, 2) / 8) / 2
    torch.testing.assert_close(table[1], torch.cat((half.cos(), half.sin())))


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_never_reads_a_value_on_the_host(tmp_path, name):
    """On the meta device tensors have no values: a host read or a shape from data would raise."""
    config = ModelConfig.from_folder(write_config(tmp_path, CONFIGS[name]))
    model = build_model(config, torch.bfloat16, META, TorchOps(), max_model_len=128)
    positions = torch.empty(7, dtype=torch.int32, device=META)
    prompt_lens = positions if model.uses_prompt_lens else None
    layers = []

    def attend(layer, qkv, rotation):
        layers.append(layer)
        if not isinstance(qkv, RotatedHeads):
            assert qkv.shape == (7, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
            assert qkv.is_contiguous()
        q, k, v = rotated_heads(layer, qkv, rotation)
        assert k.shape == v.shape == (7, layer.num_kv_heads, layer.head_dim)
        return q.flatten(1).contiguous()

    hidden = model.forward(TokenInputs(positions, positions, prompt_lens), StepMixer(attend))
    assert hidden.shape == (7, config.hf_config.hidden_size)
    assert layers == model.attention_layers
    assert [layer.index for layer in layers] == list(range(config.num_layers))
    logits = model.compute_logits(hidden[:2])
    assert logits.shape == (2, config.vocab_size) and logits.dtype == torch.bfloat16


def test_llama_3_1_8b_has_its_number_of_parameters(tmp_path):
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    model_config = ModelConfig.from_folder(write_config(tmp_path, config))
    model = build_model(model_config, torch.bfloat16, META, TorchOps(), max_model_len=131072)
    assert sum(load.view.numel() for load in model.loads()) == 8_030_261_248


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_those_of_a_checkpoint(tmp_path, name):
    random_reference(CONFIGS[name]).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    model = build(tmp_path)
    shapes = {load.name: list(load.file_shape or load.view.shape) for load in model.loads()}
    assert shapes == {name: checkpoint.header(name)[0] for name in checkpoint.names}


def test_config_without_head_dim_or_kv_heads(tmp_path):
    write_config(tmp_path, llama(), head_dim=None, num_key_value_heads=None)
    layer = build(tmp_path).attention_layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 4, 8)
    assert layer.scale == 8**-0.5


def test_a_model_type_that_does_not_fit_its_architecture_is_named(tmp_path):
    config = CONFIGS["qwen2"].to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"config\.json.*model_type 'qwen2' does not fit"):
        build(tmp_path)
