"""Streamed weights are those of the file, whatever the pieces; a file that shrinks is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncllm.errors import ModelLoadError
from asyncllm.models import loader, weight_stream
from asyncllm.models.checkpoint import SINGLE_FILE, Checkpoint
from asyncllm.models.loader import load_weights
from asyncllm.models.weight_stream import Span, stream_weights
from tests.models.tiny_checkpoints import CONFIGS, build, load, random_reference, weights

CPU = torch.device("cpu")
SHAPES = {"big": (1000, 37), "scalar": (), "empty": (0, 4), "row": (513,), "small": (3, 5, 7)}


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    save_file(made, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    return made


def spans(folder: Path) -> dict[str, Span]:
    checkpoint = Checkpoint(folder)
    return {
        name: Span(*checkpoint.place(name), torch.zeros(shape, dtype=torch.bfloat16))
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("piece_bytes", [64, 4096, 4 << 20])
def test_every_byte_arrives(
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_stream, "PIECE_BYTES", piece_bytes)
    wanted = spans(tmp_path)
    sizes = list(stream_weights(wanted.values(), CPU))
    assert max(sizes) <= piece_bytes
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
    for name, span in wanted.items():
        assert torch.equal(span.target, tensors[name]), name


def test_a_file_that_shrank_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    wanted = spans(tmp_path)
    file = tmp_path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=str(file)):
        list(stream_weights(wanted.values(), CPU))


def test_a_model_through_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's path on CUDA, with all but the device."""
    random_reference(CONFIGS["qwen2"]).save_pretrained(tmp_path, max_shard_size="20KB")
    expected = weights(load(tmp_path))
    monkeypatch.setattr(loader, "_streams", lambda checkpoint, load: load.view.dim() == 2)
    model = build(tmp_path)
    load_weights(model, tmp_path, "auto", seed=0, progress=False)
    for name, view in weights(model).items():
        assert torch.equal(view, expected[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    checkpoint = Checkpoint(tmp_path)
    targets = {name: torch.zeros_like(tensor, device=cuda) for name, tensor in tensors.items()}
    wanted = [Span(*checkpoint.place(name), target) for name, target in targets.items()]
    for _ in stream_weights(wanted, cuda):
        pass
    for name, target in targets.items():
        assert torch.equal(target.cpu(), tensors[name]), name
