"""GGUF files, written by the gguf package: weights, config, tokenizer, template; lying headers."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from asyncllm import LLM, SamplingParams
from asyncllm.errors import ModelLoadError
from asyncllm.gguf_file import LLAMA3, GGUFHeader, unpack_gguf
from asyncllm.model_config import BUILTIN_MODELS, ModelConfig, resolve_model_path
from asyncllm.models.gguf_checkpoint import NAMES, PARTS, GGUFCheckpoint

TINY = BUILTIN_MODELS["tiny"]
BACK = {ours: theirs for theirs, ours in (NAMES | PARTS).items()}


def permuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter does."""
    return (
        w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    )


def gguf_name(name: str) -> str:
    if name in BACK:
        return str(BACK[name])
    _, _, number, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    return f"blk.{number}.{BACK[part]}.{suffix}"


def write_tiny(
    file: Path, kind: Any, theta: float = 10000.0, divisors: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The built-in model as a GGUF file, its matrices in `kind`; what they mean, by our names."""
    config = json.loads((TINY / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, config)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    meant = {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        values = tensor.float()
        stored = values
        if name.endswith("q_proj.weight"):
            stored = permuted(values, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            stored = permuted(values, config["num_key_value_heads"])
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), stored.numpy())
            meant[name] = values.numpy()
            continue
        data = gguf.quants.quantize(stored.numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        meant[name] = gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def add_tokenizer(writer: Any, config: dict[str, Any]) -> None:
    content = json.loads((TINY / "tokenizer.json").read_text())
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    ids = dict(content["model"]["vocab"])
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    by_id = {number: token for token, number in (ids | special).items()}
    tokens = [by_id.get(number, f"<unused{number}>") for number in range(config["vocab_size"])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    control = gguf.TokenType.CONTROL
    writer.add_token_types([control if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    template = settings.get("chat_template") or (TINY / "chat_template.jinja").read_text()
    writer.add_chat_template(template)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_are_those_that_the_package_dequantises(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    meant = write_tiny(file, getattr(gguf.GGMLQuantizationType, kind))
    checkpoint = GGUFCheckpoint(file)
    assert checkpoint.names == meant.keys()
    for name, expected in meant.items():
        found = checkpoint.read(name)
        assert list(found.shape) == checkpoint.header(name)[0]
        np.testing.assert_array_equal(found.numpy(), expected, err_msg=name)


K_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # of 256 numbers


def k_scales(packed: np.ndarray, number: int) -> tuple[int, int]:
    """Scale and minimum of 32 numbers, of six bits each in twelve bytes."""
    if number < 4:
        return packed[number] & 63, packed[number + 4] & 63
    low, high = packed[number + 4], packed[number - 4] >> 6
    return low & 15 | high << 4, low >> 4 | packed[number] >> 6 << 4


def k_numbers(kind: str, block: np.ndarray) -> np.ndarray:
    """A block's numbers by llama.cpp's definition of its layout, one after the other."""
    made = np.zeros(256, np.float32)
    half = block.view(np.float16).astype(np.float32)
    values = block.astype(int)
    if kind == "Q6_K":
        low, high, scales = values[:128], values[128:192], block[192:208].view(np.int8)
        for i in range(256):
            part, place = divmod(i, 128)
            quarter, at = divmod(place, 32)
            nibble = low[64 * part + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
            code = nibble | (high[32 * part + at] >> 2 * quarter & 3) << 4
            made[i] = half[104] * scales[8 * part + 2 * quarter + at // 16] * (code - 32)
        return made
    start = 48 if kind == "Q5_K" else 16
    for i in range(256):
        number, at = divmod(i, 32)
        scale, least = k_scales(values[4:16], number)
        code = values[start + 32 * (number // 2) + at] >> 4 * (number % 2) & 15
        if kind == "Q5_K":
            code += (values[16 + at] >> number & 1) << 4
        made[i] = half[0] * scale * code - half[1] * least
    return made


@pytest.mark.parametrize("kind", K_BYTES)
def test_k_quants_by_their_definition(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (6, K_BYTES[kind]), np.uint8)
    factors = rng.normal(0, 0.1, (6, 2)).astype(np.float16).view(np.uint8)
    blocks[:, -2:] = factors[:, :2]  # of Q6_K; codes of the others
    if kind != "Q6_K":
        blocks[:, :4] = factors
    file = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    kind_id = getattr(gguf.GGMLQuantizationType, kind)
    writer.add_tensor("blk.0.ffn_up.weight", blocks.reshape(3, -1), raw_dtype=kind_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFCheckpoint(file).read("model.layers.0.mlp.up_proj.weight").numpy()
    expected = np.stack([k_numbers(kind, block) for block in blocks]).reshape(3, 512)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_types_are_read_or_refused_by_name(kind: Any, tmp_path: Path) -> None:
    """Served are those that the package dequantises; it raises `NotImplementedError` of others."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    content = np.random.default_rng(3).integers(0, 60, (2, 2 * num_bytes), np.uint8)
    file = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("output.weight", content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        expected = gguf.dequantize(content, kind)
    except NotImplementedError:
        with pytest.raises(ModelLoadError, match=rf"gguf: output.weight has type {kind.name}, "):
            GGUFCheckpoint(file)
        return
    assert expected.shape == (2, 2 * size) and np.isfinite(expected).all()
    np.testing.assert_array_equal(GGUFCheckpoint(file).read("lm_head.weight").numpy(), expected)


@pytest.mark.slow
def test_a_file_is_served_with_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "tiny.gguf"
    write_tiny(file, gguf.GGMLQuantizationType.Q8_0)
    questions = ["What is 12 + 7?", "What is the capital of France?", "Spell: house"]
    params = SamplingParams(temperature=0, max_tokens=24)
    answers = []
    for model in ("tiny", str(file)):
        llm = LLM(model, kv_cache_memory_bytes=1 << 26, swap_space=0)
        chats = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(chats, params, use_tqdm=False)
        answers.append([(o.prompt_token_ids, o.outputs[0].text) for o in outputs])
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3(factor: float, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    parameters = LLAMA3 | {"rope_type": "llama3", "factor": factor, "rope_theta": 500000.0}
    llama = LlamaConfig(hidden_size=256, num_attention_heads=8, head_dim=64,
                        max_position_embeddings=131072, rope_parameters=parameters)  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](llama)
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    write_tiny(file, gguf.GGMLQuantizationType.F16, 500000.0, (plain / scaled).numpy())
    config = ModelConfig.from_folder(resolve_model_path(str(file))).hf_config
    assert config.rope_parameters == parameters
    write_tiny(file, gguf.GGMLQuantizationType.F16, 500000.0, (plain / scaled).numpy() + 1)
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight is not that of Llama 3"):
        resolve_model_path(str(file))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with one tensor, and a value of each kind."""
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_array("some.strings", ["a", "bc"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def test_a_header(small: bytes, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(small)
    header = GGUFHeader(file)
    assert header.metadata["some.strings"] == ["a", "bc"]
    assert header.metadata["some.numbers"] == [1, 2, 3]
    assert header.tensors["token_embd.weight"].shape == (4, 32)


def refuse_or_read(file: Path) -> None:
    """Either it is read, or the error names the file; memory stays below what the file has."""
    tracemalloc.start()
    try:
        GGUFCheckpoint(file).read("model.embed_tokens.weight")
    except ModelLoadError as error:
        assert str(file) in str(error)
    except KeyError as error:  # its name was changed: the loader asks for names that are there
        assert "embed_tokens" in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("value", [0, 1, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_lie_anywhere_in_the_header(value: int, small: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lie.gguf"
    for at in range(0, len(small) - 512 - 8, 3):  # all but the tensor's bytes
        file.write_bytes(small[:at] + struct.pack("<Q", value) + small[at + 8 :])
        refuse_or_read(file)


def test_random_damage_and_every_early_end(small: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "damaged.gguf"
    for end in range(0, len(small), 7):
        file.write_bytes(small[:end])
        refuse_or_read(file)
    for _ in range(200):
        damaged = bytearray(small)
        for _ in range(rng.randrange(1, 5)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file.write_bytes(damaged)
        refuse_or_read(file)


@pytest.mark.slow
def test_an_empty_cache_variable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is in the user's cache then, not where the process happens to be."""
    write_tiny(tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert unpack_gguf(tmp_path / "m.gguf").is_relative_to(tmp_path / "home" / ".cache")
    assert not (tmp_path / "asyncllm").exists()
