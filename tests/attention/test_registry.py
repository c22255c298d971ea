"""Which attention backend `auto` is; backends are imported ahead by the names of their modules."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.util import find_spec
from typing import get_args

import pytest
import torch

from asyncllm.attention.registry import import_backend, resolve_backend
from asyncllm.config import AttentionBackendName

NAMES = sorted(set(get_args(AttentionBackendName)) - {"auto"})


@pytest.mark.parametrize("name", NAMES)
def test_backends_are_modules(name: AttentionBackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    import_backend(name)
    assert len(imported) == (name != "torch")  # whose module nothing waits for
    assert all(find_spec(module) for module in imported)


@pytest.mark.parametrize(
    ("capability", "is_fp8", "expected"),
    [((9, 0), True, "flashinfer"), ((8, 0), False, "flashinfer"), ((8, 0), True, "torch")],
)
def test_auto_is_torch_where_fp8_cannot_be_converted(
    capability: tuple[int, int],
    is_fp8: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Asked several times in a start, it says nothing: the worker warns, once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert resolve_backend("auto", torch.device("cuda"), is_fp8) == expected
    assert not caplog.text
