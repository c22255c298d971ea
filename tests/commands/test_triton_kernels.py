"""A build lists the kernels it launched, and which Triton's cache still has; on a fake Triton."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.commands import kernels, triton_kernels
from asyncllm.commands.triton_kernels import CachedVariant, print_compiled, read_list, write_list
from asyncllm.config import EngineArgs, EngineConfig


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EngineConfig:
    """On a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7+git"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = EngineArgs(device="cpu").create_engine_config()
    return replace(made, device="cuda", dtype="bfloat16")


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Those of a Triton that is not there."""
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    return knobs


def kernel(name: str, folder: Path) -> CachedVariant:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    file.touch()
    return CachedVariant(name, str(file))


def test_a_line_for_what_is_compiled(
    knobs: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(name: str, cache_hit: bool) -> None:
        group: dict[str, Any] = {f"{name}.json": f"/cache/{name}.json", f"{name}.cubin": "x"}
        knobs.compilation.listener(
            src=None, metadata={"name": name}, metadata_group=group, times=None, cache_hit=cache_hit
        )

    with print_compiled() as launched:
        launch("fresh", cache_hit=False)
        launch("known", cache_hit=True)
    assert launched == [
        CachedVariant("fresh", "/cache/fresh.json"),
        CachedVariant("known", "/cache/known.json"),
    ]
    assert capsys.readouterr().out == "  fresh\n"
    assert knobs.compilation.listener is None


def test_a_list_is_of_one_kind_of_start(config: EngineConfig, tmp_path: Path) -> None:
    found = kernel("pick", tmp_path)
    assert read_list(config) is None
    write_list(config, [found, found])
    assert read_list(config) == [found]
    assert read_list(replace(config, max_num_seqs=3)) == [found]  # the same kernels
    assert read_list(replace(config, dtype="float16")) is None


@pytest.mark.parametrize(
    "left", [b"", b'[{"name": "pi', b'[{"name": 1}]', b"\xff", b'[{"name": "\xff"}]']
)
def test_a_list_that_was_damaged_is_none(
    config: EngineConfig, left: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write_list(config, [])
    triton_kernels._path(config).write_bytes(left)
    assert read_list(config) is None
    assert "is no list of kernels" in caplog.text


def test_what_is_printed(
    config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not kernels._print_triton(config)
    assert "no build of this model" in capsys.readouterr().out
    here = [kernel("look", tmp_path / "a"), kernel("look", tmp_path / "b")]
    write_list(config, [*here, kernel("pick", tmp_path / "a")])
    assert kernels._print_triton(config)
    assert capsys.readouterr().out == ("built   look (Triton, 2 variants)\nbuilt   pick (Triton)\n")
    Path(here[0].file).unlink()
    assert not kernels._print_triton(config)
    assert "missing look (Triton)\n" in capsys.readouterr().out
