"""Bytecode that is missing is found and written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from asyncllm.commands.bytecode import modules_without_bytecode, write_bytecode


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
