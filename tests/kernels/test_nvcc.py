"""CUDA sources as libraries: compiled once, whole or not at all; without a compiler, none."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from asyncllm.host import cache_folder
from asyncllm.kernels import nvcc
from asyncllm.kernels.declaration import CudaKernel
from asyncllm.kernels.nvcc import Library
from asyncllm.kernels.persistent_decode import KERNEL

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
    monkeypatch.setattr(nvcc, "find_compiler", lambda: str(folder / "nvcc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write_compiler(folder: Path, work: str) -> None:
    (folder / "nvcc").write_text(COMPILER.format(folder=folder, work=work))
    (folder / "nvcc").chmod(0o755)


def test_compiled_once_for_a_source_and_an_architecture(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(nvcc.ctypes, "CDLL", lambda path: loaded.append(path))
    write_compiler(compiler, 'touch "$out"')
    source = tmp_path / "kernel.cu"
    source.write_text("// one")
    Library(source, (9, 0)).load()
    Library(source, (9, 0)).load()
    assert loaded[0] == loaded[1] and Path(loaded[0]).exists()
    calls = (compiler / "calls").read_text().splitlines()
    assert len(calls) == 1 and "code=sm_90a" in calls[0]
    Library(source, (10, 0)).load()
    source.write_text("// two")
    Library(source, (9, 0)).load()
    Library(source, (9, 0), ("-DSIZE=1",)).load()
    assert len({*loaded}) == 4
    calls = (compiler / "calls").read_text().splitlines()
    assert len(calls) == 4 and "-DSIZE=1" in calls[3]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "header.cuh").write_text("// included, perhaps")
    Library(source, (9, 0)).load()
    assert len({*loaded}) == 5


def test_a_compiler_that_fails_leaves_nothing(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(compiler, 'echo half > "$out"; echo "kernel.cu(1): error: no" >&2; exit 1')
    source = tmp_path / "kernel.cu"
    source.write_text("// broken")
    assert Library(source, (9, 0)).load() is None
    assert "kernel.cu(1): error: no" in caplog.text
    assert list(cache_folder().iterdir()) == []


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvcc, "find_compiler", lambda: None)
    with caplog.at_level(logging.INFO, "asyncllm"):
        assert Library(KERNEL.source, (9, 0)).load() is None
    assert "no nvcc" in caplog.text


def test_the_compiler_is_found_in_cuda_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    write_compiler(tmp_path / "bin", "")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvcc.find_compiler() == str(tmp_path / "bin" / "nvcc")


def test_what_cannot_be_loaded_stops_nobody(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(compiler, 'echo "no library" > "$out"')
    source = tmp_path / "kernel.cu"
    source.write_text("// fine")
    assert Library(source, (9, 0)).load() is None
    assert "kernel.cu: falling back to other kernels: " in caplog.text


class Args(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int32), ("address", ctypes.c_void_p))


SOURCE = f"""
#include "{nvcc.INCLUDE_FOLDER}/layout.cuh"
struct Args {{ int32_t number; void* address; }};
EXPORT_LAYOUT(Args, FIELD(number), FIELD(address))
extern "C" int asyncllm_twice(const Args* x, int blocks, void* stream) {{
    return x->number * blocks + (stream == nullptr);
}}
"""


def declared(source: Path) -> CudaKernel:
    return CudaKernel(
        name="twice",
        falls_back_to="once",
        source=source,
        structs=(Args,),
        capabilities=((9, 0),),
        definitions_for=lambda start: (),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """One that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_launch_function_is_waited_for_and_called(
    compiler: Path, tmp_path: Path, gpu: torch.device
) -> None:
    kernel = declared(tmp_path / "kernel.cu")
    kernel.source.write_text(SOURCE)
    write_compiler(compiler, f'g++ -x c++ -shared -fPIC {kernel.source} -o "$out"')
    launch = kernel.begin_loading(gpu)()
    assert launch is not None
    assert launch(ctypes.byref(Args(20)), 2, 0) == 41
    write_compiler(compiler, "exit 1")
    assert kernel.begin_loading(gpu)() is not None
    other = declared(tmp_path / "other.cu")
    other.source.write_text("// other")
    assert other.begin_loading(gpu)() is None


def test_where_it_is_not_supported_nothing_is_compiled(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: torch.device
) -> None:
    kernel = declared(tmp_path / "kernel.cu")
    kernel.source.write_text(SOURCE)
    assert kernel.begin_loading(gpu, None)() is None
    assert kernel.begin_loading(torch.device("cpu"))() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernel.begin_loading(gpu)() is None
    assert not (compiler / "calls").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("struct", "fields", "wrong"),
    [
        ("int64_t number; void* address;", "FIELD(number), FIELD(address)", "['number']"),
        (
            "void* address; int32_t number;",
            "FIELD(address), FIELD(number)",
            "['address', 'number']",
        ),
        (
            "int32_t number; void* address; int32_t more;",
            "FIELD(number), FIELD(address), FIELD(more)",
            "['more', 'sizeof']",
        ),
        ("int32_t number; void* address; int more;", "FIELD(number), FIELD(address)", "['sizeof']"),
    ],
)
def test_another_struct_than_the_source_has_is_an_error(
    compiler: Path, tmp_path: Path, gpu: torch.device, struct: str, fields: str, wrong: str
) -> None:
    kernel = declared(tmp_path / "kernel.cu")
    text = SOURCE.replace("int32_t number; void* address;", struct)
    text = text.replace("FIELD(number), FIELD(address)", fields)
    kernel.source.write_text(text)
    write_compiler(compiler, f'g++ -x c++ -shared -fPIC {kernel.source} -o "$out"')
    with pytest.raises(TypeError, match=re.escape(wrong)):
        kernel.begin_loading(gpu)()


def test_who_asks_while_it_is_compiled_waits_for_the_same(compiler: Path, tmp_path: Path) -> None:
    write_compiler(compiler, "exit 1")
    source = tmp_path / "kernel.cu"
    source.write_text("// any")
    first = Library(source, (9, 0)).begin_loading()
    second = Library(source, (9, 0), (), fallback="something else").begin_loading()
    assert first() is None and second() is None
    assert len((compiler / "calls").read_text().splitlines()) == 1


def test_without_a_home_there_is_no_library(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert Library(KERNEL.source, (9, 0)).load() is None
    assert f"{KERNEL.source.name}: falling back to " in caplog.text
