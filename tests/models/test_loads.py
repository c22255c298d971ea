"""Slices, transforms and dtypes of `Load`s, mapped and streamed; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from asyncllm.errors import ModelLoadError
from asyncllm.models import loader
from asyncllm.models.base import CausalLM, Load
from asyncllm.models.checkpoint import SINGLE_FILE
from asyncllm.models.loader import load_weights

FILE: dict[str, torch.Tensor] = {
    "first": torch.arange(35.0).bfloat16(),  # what comes later does not begin at byte 0
    "matrix": torch.arange(48.0).view(8, 6).bfloat16(),
    "cube": torch.arange(120).view(4, 5, 6).to(torch.int32),
    "words": torch.tensor([[0x04030201, 0x08070605]], dtype=torch.int32),
    "scale": torch.tensor(0.5),
}


class Loads:
    """As much of a `CausalLM` as the loader asks for."""

    aliases: Mapping[str, str] = {}

    def __init__(self, *loads: Load) -> None:
        self._loads = loads
        self.num_finished = 0

    def loads(self) -> Iterator[Load]:
        return iter(self._loads)

    def finish_loading(self) -> None:
        self.num_finished += 1


def view(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype)


def run(folder: Path, *loads: Load) -> None:
    """The others of the file's tensors are loaded too."""
    save_file(FILE, folder / SINGLE_FILE)
    asked = {load.name for load in loads}
    others = [Load(name, torch.empty_like(t)) for name, t in FILE.items() if name not in asked]
    model = Loads(*loads, *others)
    load_weights(cast(CausalLM, model), folder, "auto", seed=0, progress=False)
    assert model.num_finished == 1


@pytest.fixture(params=["mapped", "streamed"])
def load_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's path on CUDA, with all but the device, beside that of the CPU."""
    if request.param == "streamed":
        monkeypatch.setattr(loader, "STREAMED_DEVICES", ("cpu",))


@pytest.mark.usefixtures("load_path")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("first", ()),
        ("scale", ()),
        ("first", (slice(7, 20),)),
        ("matrix", (slice(0, 4),)),
        ("matrix", (slice(4, 8),)),
        ("matrix", (slice(6, None),)),
        ("matrix", (slice(-3, -1),)),
        ("matrix", (slice(None), slice(2, 4))),
        ("matrix", (slice(3, 5), slice(1, 6))),
        ("cube", (slice(1, 3),)),
        ("cube", (slice(None), slice(4, 5))),
    ],
)
def test_a_slice_is_that_of_the_file(tmp_path: Path, name: str, part: tuple[slice, ...]) -> None:
    expected = FILE[name][part]
    filled = torch.zeros_like(expected)
    run(tmp_path, Load(name, filled, part, file_shape=tuple(FILE[name].shape)))
    assert torch.equal(filled, expected)


@pytest.mark.usefixtures("load_path")
def test_one_tensor_fills_several_views_of_a_merged_weight(tmp_path: Path) -> None:
    merged = view(10, 6)
    loads = [
        Load("matrix", merged[:4], (slice(4, 8),), file_shape=(8, 6)),
        Load("matrix", merged[6:], (slice(0, 4),), file_shape=(8, 6)),
    ]
    run(tmp_path, *loads)
    assert torch.equal(merged[:4], FILE["matrix"][4:])
    assert torch.equal(merged[6:], FILE["matrix"][:4])
    assert (merged[4:6] == 77).all()


@pytest.mark.usefixtures("load_path")
def test_views_that_are_no_rows_and_other_float_dtypes(tmp_path: Path) -> None:
    columns, converted = view(8, 12), view(8, 6, dtype=torch.float32)
    part = (slice(0, 8),)
    run(
        tmp_path,
        Load("matrix", columns[:, 6:]),
        Load("matrix", converted, part, file_shape=(8, 6)),
    )
    assert torch.equal(columns[:, 6:], FILE["matrix"]) and (columns[:, :6] == 77).all()
    assert torch.equal(converted, FILE["matrix"].float())


@pytest.mark.usefixtures("load_path")
def test_transforms(tmp_path: Path) -> None:
    transposed, bytes_, scales = view(6, 4), view(1, 8, dtype=torch.int8), view(3)
    run(
        tmp_path,
        Load("matrix", transposed, (slice(2, 6),), torch.t, file_shape=(8, 6)),
        Load(
            "words",
            bytes_,
            transform=lambda words: words.view(torch.int8),
            file_shape=(1, 2),
            file_dtype=torch.int32,
        ),
        Load("scale", scales, transform=lambda scale: scale.expand(3), file_shape=()),
    )
    assert torch.equal(transposed, FILE["matrix"][2:6].t())
    assert bytes_.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert scales.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load("no.such", view(2)), ["missing", "no.such"]),
        (Load("matrix", view(4, 6)), ["matrix", "[8, 6]", "[4, 6]"]),
        (Load("matrix", view(4, 6), (slice(0, 4),), file_shape=(16, 6)), ["[8, 6]", "[16, 6]"]),
        (Load("cube", view(4, 5, 6)), ["cube", "I32", "BF16"]),
        (Load("matrix", view(8, 6, dtype=torch.int32)), ["matrix", "BF16", "I32"]),
        (Load("cube", view(4, 5, 6, dtype=torch.int8)), ["cube", "I32", "I8"]),
        (
            Load("matrix", view(6, 8), transform=torch.t, file_shape=(8, 6), file_dtype=torch.int8),
            ["matrix", "BF16", "I8"],
        ),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(
    tmp_path: Path, load: Load, words: list[Any]
) -> None:
    good = Load("first", view(35))
    with pytest.raises(ModelLoadError) as error:
        run(tmp_path, good, load)
    for word in (tmp_path / SINGLE_FILE, *words):
        assert str(word) in str(error.value)
    assert (good.view == 77).all()


def test_what_no_load_takes_is_named(tmp_path: Path) -> None:
    save_file(FILE, tmp_path / SINGLE_FILE)
    loads = [Load(name, torch.empty_like(FILE[name])) for name in FILE if name != "cube"]
    with pytest.raises(ModelLoadError, match="unexpected tensors: cube"):
        load_weights(cast(CausalLM, Loads(*loads)), tmp_path, "auto", seed=0, progress=False)


@pytest.mark.usefixtures("load_path")
def test_a_slice_that_does_not_fit_its_view_is_no_row_more_or_less(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="matrix"):
        run(tmp_path, Load("matrix", view(4, 6), (slice(0, 3),), file_shape=(8, 6)))


def test_a_transform_that_does_not_fit_its_view_is_no_broadcast(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="matrix"):
        run(tmp_path, Load("matrix", view(8, 6), transform=lambda t: t[:1], file_shape=(8, 6)))
