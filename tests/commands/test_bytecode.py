"""Bytecode that is missing is found and written, or kept by a start for the next one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncllm.commands.bytecode import modules_without_bytecode, write_bytecode
from tests.waiting import PATIENCE_SECONDS


def test_missing_bytecode_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "made_up_module.py"
    source.write_text("X = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.import_module("made_up_module")
    try:
        (target,) = [cached for file, cached in modules_without_bytecode() if file == source]
        assert not target.exists()
        monkeypatch.setattr(
            sys, "modules", {"made_up_module": sys.modules["made_up_module"], "sys": sys}
        )
        assert write_bytecode() == (1, 0)
        assert target.exists() and not modules_without_bytecode()
        target.unlink()
        target.parent.rmdir()
        target.parent.write_text("in the way")  # where no folder can be made
        assert write_bytecode() == (0, 1)
    finally:
        monkeypatch.undo()
        sys.modules.pop("made_up_module")


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from asyncllm.commands import bytecode
if {is_full}:
    bytecode.LEAST_FREE_BYTES = 1 << 100
bytecode.keep_bytecode()
import torch
print(torch.__cached__)
"""


def start(folder: Path, cache: Path, is_full: bool = False, **environment: str) -> Path:
    """Where a process looks for the bytecode of a torch of one file, after `keep_bytecode`.

    is_full: the disk.
    """
    package = folder / "torch"
    package.mkdir(exist_ok=True)
    source = package / "__init__.py"
    if not source.exists():
        source.write_text("X = 1\n")
    outside = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
    inherited = {name: value for name, value in os.environ.items() if name not in outside}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=str(folder), is_full=is_full)],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**inherited, "XDG_CACHE_HOME": str(cache), **environment},
    )
    return Path(done.stdout.strip())


def test_bytecode_that_nobody_writes_is_kept_in_our_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    kept = start(tmp_path, cache, PYTHONDONTWRITEBYTECODE="1")
    assert kept.is_relative_to(cache / "asyncllm") and kept.exists()
    written = kept.stat().st_mtime_ns
    assert start(tmp_path, cache, PYTHONDONTWRITEBYTECODE="1") == kept
    assert kept.stat().st_mtime_ns == written  # found, not made again


def test_python_writes_it_where_it_may(tmp_path: Path) -> None:
    beside = start(tmp_path, tmp_path / "cache")
    assert beside.is_relative_to(tmp_path / "torch") and beside.exists()
    # There is some now: that is used, whoever may write.
    assert start(tmp_path, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == beside
    assert not (tmp_path / "cache").exists()


def test_without_a_folder_all_stays_as_it_was(tmp_path: Path) -> None:
    cache = tmp_path / "a file"
    cache.write_text("in the way")
    beside = start(tmp_path, cache, PYTHONDONTWRITEBYTECODE="1")
    assert beside.is_relative_to(tmp_path / "torch") and not beside.exists()


def test_a_folder_that_the_user_named_is_used(tmp_path: Path) -> None:
    cache, named = tmp_path / "cache", {"PYTHONPYCACHEPREFIX": str(tmp_path / "named")}
    assert start(tmp_path, cache, **named).is_relative_to(tmp_path / "named")
    (tmp_path / "torch" / "__init__.py").write_text("XY = 12\n")
    for place in (tmp_path / "named").rglob("*.pyc"):
        place.unlink()
    place = start(tmp_path, cache, PYTHONDONTWRITEBYTECODE="1", **named)
    assert place.is_relative_to(tmp_path / "named") and not cache.exists()


def test_on_a_full_disk_nothing_is_written_and_what_is_there_is_found(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    beside = start(tmp_path, cache, is_full=True, PYTHONDONTWRITEBYTECODE="1")
    assert beside.is_relative_to(tmp_path / "torch") and not beside.exists()
    kept = start(tmp_path, cache, PYTHONDONTWRITEBYTECODE="1")
    (tmp_path / "torch" / "__init__.py").write_text("XY = 12\n")
    written = kept.stat().st_mtime_ns
    assert start(tmp_path, cache, is_full=True, PYTHONDONTWRITEBYTECODE="1") == kept
    assert kept.stat().st_mtime_ns == written
