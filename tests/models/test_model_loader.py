"""Weights into a model: what is wrong with a folder is said with file and key; dummy weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.config import EngineArgs
from asyncllm.errors import ModelLoadError
from asyncllm.models import loader
from asyncllm.models.base import Load
from asyncllm.models.checkpoint import INDEX_FILE, SINGLE_FILE
from asyncllm.models.layers.torch_ops import TorchOps
from asyncllm.models.loader import _fill_dummy, load_weights
from asyncllm.models.parallel.mesh import ALONE
from asyncllm.worker import model_loading
from tests.models.quantized_files import FORMATS, write_checkpoint
from tests.models.tiny_checkpoints import CONFIGS, build, llama, load, random_reference, weights

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    random_reference(CONFIGS["llama"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    random_reference(CONFIGS["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def rewrite(folder, change):
    """Let `change` edit the dict of tensors in the single file."""
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def fails(folder, *words):
    """Loading fails and says all of `words`."""
    with pytest.raises(ModelLoadError) as error:
        load(folder)
    for word in words:
        assert str(word) in str(error.value)
    return str(error.value)


# What the names, shapes and dtypes may do to us


def test_missing_tensor(folder):
    rewrite(folder, lambda tensors: tensors.pop(Q_PROJ))
    fails(folder, folder / SINGLE_FILE, "missing", Q_PROJ)


def test_many_missing_tensors_are_counted(folder):
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:12]])
    assert fails(folder, "and 7 more").count(".weight") == 5


def test_unexpected_tensor(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    fails(folder, folder / SINGLE_FILE, "unexpected", "model.extra.weight")


def test_bias_that_the_configuration_does_not_mention(folder):
    name = Q_PROJ.replace("weight", "bias")
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(32)}))
    fails(folder, "unexpected", name)


def test_misshapen_tensor(folder):
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(16, 32)}))
    fails(folder, folder / SINGLE_FILE, Q_PROJ, "[16, 32]", "[32, 32]")


def test_tensor_of_integers(folder):
    zeros = torch.zeros(32, 32, dtype=torch.int8)
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: zeros}))
    fails(folder, folder / SINGLE_FILE, Q_PROJ, "I8")


def test_old_rotary_buffers_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(folder)


def test_other_float_dtypes_are_converted(folder):
    expected = weights(load(folder))
    rewrite(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    for name, view in weights(load(folder)).items():
        assert torch.equal(view, expected[name].half().float()), name


def test_tied_head_may_repeat_the_embedding(tmp_path):
    random_reference(CONFIGS["llama-tied"]).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE_FILE)

    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, repeat)
    model = load(tmp_path)
    assert "lm_head.weight" not in weights(model)
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    fails(tmp_path, tmp_path / SINGLE_FILE, "lm_head.weight", "model.embed_tokens.weight")


# What the files may do to us


def test_no_safetensors(folder):
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    fails(folder, folder, SINGLE_FILE, INDEX_FILE)


def test_files_that_are_not_there_are_said_before_there_is_a_model(folder, monkeypatch):
    (folder / SINGLE_FILE).unlink()
    monkeypatch.setattr(model_loading, "build_model", None)
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True).create_engine_config()
    with pytest.raises(ModelLoadError, match="holds neither"):
        model_loading.make_model(config, TorchOps(), ALONE, torch.device("cpu"))


@pytest.mark.parametrize("kept_bytes", [0, 5, 1000, -1])
def test_truncated_file(folder, kept_bytes):
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:kept_bytes])
    fails(folder, folder / SINGLE_FILE)


def test_corrupt_header(folder):
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(b"\xff" * 64 + data[64:])
    fails(folder, folder / SINGLE_FILE)


def test_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    name = min(load_file(shard))
    shard.unlink()
    fails(sharded, shard, "missing", name)


def test_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    fails(sharded, shard)


def test_index_promises_what_the_shard_lacks(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0].name
    rewrite_index(sharded, lambda weight_map: weight_map.update({Q_PROJ: shard}))
    fails(sharded, sharded / shard, Q_PROJ, INDEX_FILE)


def test_index_lacks_a_whole_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    names = set(load_file(shard))
    rewrite_index(sharded, lambda weight_map: [weight_map.pop(name) for name in names])
    fails(sharded, sharded / INDEX_FILE, "missing", min(names))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}'])
def test_broken_index(sharded, text):
    (sharded / INDEX_FILE).write_text(text)
    fails(sharded, sharded / INDEX_FILE, "weight_map")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "", 3, None])
def test_index_that_points_elsewhere(sharded, shard):
    rewrite_index(sharded, lambda weight_map: weight_map.update({Q_PROJ: shard}))
    fails(sharded, sharded / INDEX_FILE, Q_PROJ, repr(shard))


# What loading gives


def test_shards_hold_the_same_weights_as_one_file(sharded, tmp_path_factory):
    one_file = tmp_path_factory.mktemp("one_file")
    random_reference(CONFIGS["llama"]).save_pretrained(one_file)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    expected = weights(load(one_file))
    for name, tensor in weights(load(sharded)).items():
        assert torch.equal(tensor, expected[name]), name


def test_progress_bar_only_when_asked_and_slow(folder, monkeypatch, capfd):
    model = build(folder)
    load_weights(model, folder, "auto", seed=0, progress=True)
    assert "Loading" not in capfd.readouterr().err
    monkeypatch.setattr(loader, "DELAY_S", 0.0)
    load_weights(model, folder, "auto", seed=0, progress=False)
    assert "Loading" not in capfd.readouterr().err
    load_weights(model, folder, "auto", seed=0, progress=True)
    assert "Loading weights" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights(tmp_path, dtype):
    llama(architectures=["LlamaForCausalLM"], mlp_bias=True).save_pretrained(tmp_path)

    def dummy(seed):
        model = build(tmp_path, dtype=dtype)
        load_weights(model, tmp_path, "dummy", seed, progress=False)
        return weights(model)

    first, again, other = dummy(1), dummy(1), dummy(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        else:
            assert not torch.equal(tensor, other[name]), name
            assert tensor.float().abs().max() < 0.2, name
    assert 0.015 < first["model.embed_tokens.weight"].float().std() < 0.025


@pytest.mark.parametrize(
    "name", ["down_proj.weight", "experts.down_proj", "experts.down_proj_bias"]
)
def test_dummy_weights_that_are_transformed_have_both_signs(name):
    """With one sign, all of gpt-oss's answers were the same."""
    view = torch.empty(100, 100)
    load = Load(name, view, transform=lambda tensor: tensor.T)
    _fill_dummy([load], seed=0)
    assert view.mean().abs() < 0.001 and 0.015 < view.std() < 0.025


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_of_quantised_checkpoints(tmp_path, name):
    """Where the checkpoint is, and where only its configuration is."""
    write_checkpoint(FORMATS[name], tmp_path)
    for _ in range(2):
        model = build(tmp_path)
        for tensor in (t for each in model.loads() for t in (each.view, *each.others)):
            tensor.view(torch.uint8).fill_(255)  # of floats NaN
        load_weights(model, tmp_path, "dummy", seed=0, progress=False)
        for each in model.loads():
            for tensor in (each.view, *each.others):
                assert tensor.float().isfinite().all(), each.name
                if tensor.dtype == torch.int32:  # the order of columns
                    assert torch.equal(tensor.sort().values[0], torch.arange(tensor.shape[1]))
                elif "scale" in each.name or "absmax" in each.name:
                    assert (tensor > 0).all(), each.name
        (tmp_path / SINGLE_FILE).unlink(missing_ok=True)
