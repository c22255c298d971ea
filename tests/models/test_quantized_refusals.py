"""Files that are broken, or not served exactly, are refused in seconds, by tensor and field."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.errors import ModelLoadError
from asyncllm.models.checkpoint import SINGLE_FILE
from tests.models.quantized_files import FORMATS, write_checkpoint
from tests.models.tiny_checkpoints import load

LAYER = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load(folder)
    return str(error.value)


def with_config(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """A checkpoint of this format, with other keys in its quantization_config, by dotted names."""
    write_checkpoint(FORMATS[name], folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        target = config["quantization_config"]
        for part in path:
            target = target[part]
        target[last] = value
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fp8-tensor", {"quant_method": "quark"}, ["quant_method", "'quark'"]),
        ("fp8-tensor", {"activation_scheme": "magic"}, ["activation_scheme", "'magic'"]),
        ("fp8-block", {"weight_block_size": [0, 32]}, ["weight_block_size", "[0, 32]"]),
        ("fp8-block", {"weight_block_size": [64, 32]}, ["weight_scale_inv", "shape"]),
        ("fp8-block", {"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert"]),
        ("fp8-block", {"modules_to_not_convert": ["q_proj"]}, ["self_attn", "not quantised alike"]),
        ("gptq", {"bits": 3}, ["bits", "3", "4, 8"]),
        ("gptq", {"bits": True}, ["bits"]),
        ("gptq", {"group_size": 48}, ["group_size 48", "q_proj", "64 columns"]),
        ("gptq", {"group_size": 16}, ["scales", "shape", "[4, 64]"]),
        ("gptq", {"group_size": "all"}, ["group_size", "'all'"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format", "'marlin'"]),
        ("gptq", {"checkpoint_format": "gptq_v2"}, ["qzeros", "8 throughout"]),
        ("gptq", {"lm_head": True}, ["lm_head", "True"]),
        ("gptq-order", {"desc_act": False}, ["g_idx", "desc_act"]),
        ("awq", {"version": "gemv"}, ["version", "'gemv'"]),
        ("auto-round-gptq", {"packing_format": "auto_round:x"}, ["packing_format"]),
        ("auto-round-gptq", {"act_bits": 8}, ["act_bits", "8"]),
        ("modelopt-fp8", {"quant_algo": "NVFP4"}, ["quant_algo", "'NVFP4'"]),
        ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, ["bnb_4bit_quant_type", "'fp4'"]),
        ("ct-pack-4", {"format": "nvfp4-pack-quantized"}, ["format", "nvfp4"]),
        ("ct-pack-4", {"config_groups": {}}, ["config_groups"]),
        ("ct-pack-4", {"config_groups.group_0.weights.num_bits": 2}, ["num_bits", "2"]),
        ("ct-pack-4", {"config_groups.group_0.weights.group_size": None}, ["group_size"]),
        ("ct-pack-4", {"config_groups.group_0.weights.strategy": "x"}, ["strategy", "'x'"]),
        ("ct-fp8-channel", {"config_groups.group_0.weights.symmetric": False}, ["symmetric"]),
        ("ct-fp8-block", {"config_groups.group_0.weights.block_structure": [8]}, ["block_str"]),
        ("ct-int8", {"config_groups.group_0.input_activations.num_bits": 4}, ["num_bits", "4"]),
        ("ct-pack-4", {"transform_config": {"config_groups": {"u": {}}}}, ["transform_config"]),
        ("ct-pack-4", {"ignore": ["re:("]}, ["ignore", "pattern '('", "missing )"]),
        ("ct-pack-4", {"ignore": ["re:(a+)+$"]}, ["ignore", "pattern '(a+)+$'", "repeats a group"]),
        ("ct-pack-4", {"ignore": ["re:" + ".*" * 7 + "x"]}, ["ignore", "repetitions"]),
        ("ct-pack-4", {"ignore": ["re:" + "x" * 2000]}, ["ignore", "2000 characters"]),
        ("ct-pack-4", {"config_groups.group_0.targets": ["re:x{9999999999}"]}, ["targets", "'x{9"]),
        ("gptq", {"dynamic": {"-:(": {}}}, ["dynamic", "pattern '('", "missing )"]),
        ("gptq", {"dynamic": {"+:(.*)*x": {"bits": 8}}}, ["dynamic", "pattern '(.*)*x'"]),
    ],
)
def test_keys(name: str, changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    message = refusal(with_config(name, tmp_path, changes))
    for word in words:
        assert word in message


def test_no_rotations_are_none(tmp_path: Path) -> None:
    load(with_config("ct-pack-4", tmp_path, {"transform_config": {}}))


def scaled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clone()
        scale.view(-1)[0] = value
        return scale

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "suffix", "change", "words"),
    [
        ("fp8-tensor", "weight_scale", scaled(0.0), ["is 0.0", "not 0"]),
        ("ct-fp8-channel", "weight_scale", scaled(float("nan")), ["is nan", "finite"]),
        ("fp8-block", "weight_scale_inv", scaled(float("inf")), ["is inf", "finite"]),
        ("fp8-block", "weight_scale_inv", lambda t: t[:-1], ["shape"]),
        ("fp8-static", "input_scale", scaled(0.0), ["is 0.0"]),
        ("gptq", "scales", scaled(0.0), ["is 0.0 at [0, 0]"]),
        ("gptq", "scales", lambda t: t.T, ["shape", "[4, 64]"]),
        ("gptq", "scales", lambda t: t.to(torch.int32), ["dtype I32"]),
        ("gptq", "qweight", lambda t: t[:-1], ["shape"]),
        ("gptq", "g_idx", lambda t: t * 0, ["equally often"]),
        ("awq", "scales", scaled(float("nan")), ["is nan"]),
        ("ct-pack-4", "weight_shape", lambda t: t + 1, ["[65, 129]", "[64, 128]"]),
        ("ct-mxfp4", "weight_scale", lambda t: t | 255, ["255, which is NaN"]),
        ("bnb-int8", "SCB", scaled(0.0), ["is 0.0"]),
        ("bnb-nf4", "weight.absmax", scaled(0.0), ["is 0.0"]),
        ("bnb-nf4", "weight.quant_map", lambda t: t * 2, ["other values than nf4"]),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:9], ["no state"]),
        (
            "bnb-nf4",
            "weight.quant_state.bitsandbytes__nf4",
            lambda t: t[:1].repeat(9000) * 0 + 91,
            ["no state", "RecursionError"],
        ),
        ("bnb-nf4-nested", "weight.nested_absmax", lambda t: t[:0], ["has 0 scales, not 1"]),
        ("bnb-nf4-nested", "weight.nested_absmax", lambda t: t.repeat(9), ["has 9 scales, not 1"]),
    ],
)
def test_tensors(
    name: str,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: list[str],
    tmp_path: Path,
) -> None:
    write_checkpoint(FORMATS[name], tmp_path)
    layer = LAYER
    if name == "fp8-block":  # whose second block has 16 bits
        layer = LAYER.replace("1", "0")
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors[f"{layer}.{suffix}"] = change(tensors[f"{layer}.{suffix}"]).contiguous()
    save_file(tensors, tmp_path / SINGLE_FILE)
    message = refusal(tmp_path)
    for word in (f"{layer}.", *words):
        assert word in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("nested_blocksize", value) for value in (None, 0, -256, 255, 16, 1 << 40, 256.5, True)),
        ("nested_blocksize", "256"),
        ("nested_blocksize", [256]),
        ("nested_offset", "0"),
        ("nested_offset", float("nan")),
        ("nested_offset", 10**400),
        ("nested_offset", None),
    ],
)
def test_states_of_nested_scales(field: str, value: object, tmp_path: Path) -> None:
    write_checkpoint(FORMATS["bnb-nf4-nested"], tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {field: value}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert f"{name} says {field} {value!r}, " in refusal(tmp_path)


@pytest.mark.parametrize("name", ["fp8-tensor", "gptq", "bnb-nf4"])
def test_files_that_end_early_or_lie(name: str, tmp_path: Path) -> None:
    write_checkpoint(FORMATS[name], tmp_path)
    file = tmp_path / SINGLE_FILE
    content = file.read_bytes()
    for broken in (content[:-100], content[:50], struct.pack("<Q", 1 << 63) + content[8:]):
        file.write_bytes(broken)
        assert SINGLE_FILE in refusal(tmp_path)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    write_checkpoint(FORMATS["gptq"], tmp_path)
    tensors: Tensors = load_file(tmp_path / SINGLE_FILE)
    del tensors[f"{LAYER}.scales"]
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert f"missing tensors: {LAYER}.scales" in refusal(tmp_path)
