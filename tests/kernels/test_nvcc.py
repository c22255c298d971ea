"""CUDA sources as libraries: compiled once, whole or not at all; without a compiler, none."""

from __future__ import annotations

import ctypes
import logging
import shutil
from pathlib import Path

import pytest

from asyncllm.attention import cuda_source
from asyncllm.cache_folder import cache_folder
from asyncllm.models.persistent_decode import SOURCE

# A "compiler" that makes an empty library of any C compiler's; it notes that it ran.
COMPILER = """#!/bin/sh
echo "$@" >> {folder}/calls
for word; do out=$word; done
{work}
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose nvcc copies `made` to its output."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(cuda_source, "find_compiler", lambda: str(folder / "nvcc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write_compiler(folder: Path, work: str) -> None:
    (folder / "nvcc").write_text(COMPILER.format(folder=folder, work=work))
    (folder / "nvcc").chmod(0o755)


def test_compiled_once_for_a_source_and_an_architecture(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(cuda_source.ctypes, "CDLL", lambda path: loaded.append(path))
    write_compiler(compiler, 'touch "$out"')
    source = tmp_path / "kernel.cu"
    source.write_text("// one")
    cuda_source.load(source, (9, 0))
    cuda_source.load(source, (9, 0))
    assert loaded[0] == loaded[1] and Path(loaded[0]).exists()
    calls = (compiler / "calls").read_text().splitlines()
    assert len(calls) == 1 and "code=sm_90a" in calls[0]
    cuda_source.load(source, (10, 0))
    source.write_text("// two")
    cuda_source.load(source, (9, 0))
    cuda_source.load(source, (9, 0), ["-DSIZE=1"])
    assert len({*loaded}) == 4
    calls = (compiler / "calls").read_text().splitlines()
    assert len(calls) == 4 and "-DSIZE=1" in calls[3]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "header.cuh").write_text("// included, perhaps")
    cuda_source.load(source, (9, 0))
    assert len({*loaded}) == 5


def test_a_compiler_that_fails_leaves_nothing(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(compiler, 'echo half > "$out"; echo "kernel.cu(1): error: no" >&2; exit 1')
    source = tmp_path / "kernel.cu"
    source.write_text("// broken")
    assert cuda_source.load(source, (9, 0)) is None
    assert "kernel.cu(1): error: no" in caplog.text
    assert list(cache_folder().iterdir()) == []


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_source, "find_compiler", lambda: None)
    with caplog.at_level(logging.INFO, "asyncllm"):
        assert cuda_source.load(SOURCE, (9, 0)) is None
    assert "no nvcc" in caplog.text


def test_the_compiler_is_found_in_cuda_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    write_compiler(tmp_path / "bin", "")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_source.find_compiler() == str(tmp_path / "bin" / "nvcc")


def test_what_cannot_be_loaded_stops_nobody(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(compiler, 'echo "no library" > "$out"')
    source = tmp_path / "kernel.cu"
    source.write_text("// fine")
    assert cuda_source.load(source, (9, 0)) is None
    assert "kernel.cu is not used" in caplog.text


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_launch_function_is_waited_for_and_called(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        'extern "C" int twice(const void* x, int blocks, void* stream) {\n'
        "    return *static_cast<const int*>(x) * blocks + (stream == nullptr);\n}\n"
    )
    write_compiler(compiler, f'g++ -x c++ -shared -fPIC {source} -o "$out"')
    launch = cuda_source.begin_loading_launch(source, "twice", (9, 0), [])()
    assert launch is not None
    assert launch(ctypes.byref(ctypes.c_int(20)), 2, 0) == 41
    write_compiler(compiler, "exit 1")
    assert cuda_source.begin_loading_launch(source, "twice", (9, 0), [])() is not None
    other = tmp_path / "other.cu"
    other.write_text("// other")
    assert cuda_source.begin_loading_launch(other, "twice", (9, 0), [])() is None


def test_who_asks_while_it_is_compiled_waits_for_the_same(compiler: Path, tmp_path: Path) -> None:
    write_compiler(compiler, "exit 1")
    source = tmp_path / "kernel.cu"
    source.write_text("// any")
    first = cuda_source.begin_loading(source, (9, 0))
    second = cuda_source.begin_loading(source, (9, 0), [])
    assert first() is None and second() is None
    assert len((compiler / "calls").read_text().splitlines()) == 1


def test_without_a_home_there_is_no_library(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert cuda_source.load(SOURCE, (9, 0)) is None
    assert f"{SOURCE.name} is not used" in caplog.text
