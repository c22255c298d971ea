"""When a start has its modules compiled by others, and when it does not."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncllm.commands import compile_ahead
from tests.waiting import PATIENCE_SECONDS

SCRIPT = Path("import_walk") / "__main__.py"
PYCACHE = shutil.ignore_patterns("__pycache__")
MANY = 3000  # more modules than are compiled while a process ends
PROGRAM = """
import ctypes, json, os, sys
PR_SET_CHILD_SUBREAPER = 36  # as in a container, where nobody else waits for what is left
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
sys.path.insert(0, {folder!r})
from pathlib import Path
from asyncllm.commands import compile_ahead as ahead
from asyncllm.commands.bytecode import keep_bytecode
ahead.SCRIPT, ahead.ROOTS, ahead.num_cores = Path({script!r}), {roots!r}, lambda: {cores}
keep_bytecode()
process = ahead.compile_ahead([])
if process is not None:
    print(json.dumps([process.pid, os.getpgid(process.pid) == os.getpgid(0)]), flush=True)
    if {waits}:
        assert process.wait() == 0
        try:
            left = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            left = None
        assert left is None, left
        import made_up
        print(json.dumps(made_up.__cached__), flush=True)
    os._exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A torch of one file, a module that imports it, and the script, which locks its file."""
    shutil.copytree(compile_ahead.SCRIPT.parent, tmp_path / "import_walk", ignore=PYCACHE)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("X = 1\n")
    (tmp_path / "made_up.py").write_text("import torch\n")
    return tmp_path


def start(
    folder: Path,
    *,
    cores: int = 4,
    roots: tuple[str, ...] = ("made_up",),
    waits: bool = True,
    **environment: str,
) -> list[Any]:
    """What a process of its own prints, in an image without bytecode."""
    program = PROGRAM.format(
        folder=str(folder),
        script=str(folder / SCRIPT),
        roots=roots,
        cores=cores,
        waits=waits,
    )
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPYCACHEPREFIX"}
    ours = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**inherited, **ours, **environment},
    )
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_first_start_has_modules_compiled_and_the_second_finds_them(folder: Path) -> None:
    (_, same_group), cached = start(folder)
    assert not same_group  # a terminal's Ctrl-C does not reach it
    assert Path(cached).is_relative_to(folder / "cache" / "asyncllm") and Path(cached).exists()
    written = Path(cached).stat()
    assert start(folder) == []
    assert Path(cached).stat() == written
    (folder / "torch" / "__init__.py").write_text("X = 12\n")  # another version
    assert len(start(folder)) == 2
    assert start(folder) == []


def test_a_start_that_ended_before_leaves_the_rest_to_the_next(folder: Path) -> None:
    start(folder)
    (sign,) = (folder / "cache").rglob("__main__*.pyc")
    sign.unlink()
    assert len(start(folder)) == 2 and sign.exists()


def test_a_folder_that_the_user_named_and_the_usual_one(folder: Path) -> None:
    named = folder / "named"
    _, cached = start(folder, PYTHONPYCACHEPREFIX=str(named), PYTHONDONTWRITEBYTECODE="")
    assert Path(cached).is_relative_to(named)
    _, cached = start(folder, PYTHONDONTWRITEBYTECODE="")
    assert Path(cached) == folder / "__pycache__" / Path(cached).name and Path(cached).exists()


def test_where_nothing_is_compiled(folder: Path) -> None:
    assert start(folder, cores=3) == []
    assert start(folder, XDG_CACHE_HOME=str(folder / "made_up.py")) == []


def test_where_nothing_may_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of torch, so of the sign that all is compiled: without it every start would look again."""
    torch, script = folder / "torch" / "__init__.py", folder / SCRIPT
    spec = importlib.util.spec_from_file_location("torch", torch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(compile_ahead, "SCRIPT", script)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    for source in (torch, script):
        assert compile_ahead.is_missing()
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode, closed=source.parent: path != closed)
            assert not compile_ahead.is_missing()
        py_compile.compile(str(source))
    assert not compile_ahead.is_missing()


def test_it_ends_with_the_start(folder: Path) -> None:
    names = tuple(f"module_{n}" for n in range(MANY))
    for name in names:
        (folder / f"{name}.py").write_text("def f():\n    return 1\n" * 100)
    ((pid, _),) = start(folder, roots=names, waits=False)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(list((folder / "cache").rglob("module_*.pyc"))) < MANY


def test_bytecode_that_is_kept_by_hash_is_left_to_python(tmp_path: Path) -> None:
    source = tmp_path / "made_up.py"
    source.write_text("X = 1\n")
    assert not compile_ahead._is_compiled(source)
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert compile_ahead._is_compiled(source)
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert compile_ahead._is_compiled(source)
    source.write_text("XY = 12\n")
    assert not compile_ahead._is_compiled(source)
