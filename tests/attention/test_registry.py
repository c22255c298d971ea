"""Backends are imported ahead by the names of their modules."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import get_args

import pytest

from asyncllm.attention.registry import import_backend
from asyncllm.config import AttentionBackendName

NAMES = sorted(set(get_args(AttentionBackendName)) - {"auto"})


@pytest.mark.parametrize("name", NAMES)
def test_backends_are_modules(name: AttentionBackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    import_backend(name)
    assert len(imported) == (name != "torch")  # whose module nothing waits for
    assert all(find_spec(module) for module in imported)
