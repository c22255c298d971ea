"""NVLink multicast is never asked for, by NCCL or by a kernel: a host may have it switched off in
ways that hang who tries."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.models.parallel import collectives

ROOT = Path(__file__).parents[2]
NAMES = ("multimem", "mnnvl", "enable_multicast", "create_allreduce_fusion_workspace")


def test_nccl_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class FakeNCCL:
        Options = SimpleNamespace

        def __init__(self, *args: Any) -> None:
            seen.append(os.environ["NCCL_NVLS_ENABLE"])

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setattr(collectives._c10d, "ProcessGroupNCCL", FakeNCCL, raising=False)
    collectives._nccl(None, 0, 2, "127.0.0.1")
    assert seen == ["0"]


def test_no_source_names_a_call_that_would() -> None:
    files = [
        file
        for room in ("asyncllm", "models", "attention", "graphs")
        for suffix in ("*.py", "*.cu", "*.cuh")
        for file in (ROOT / room).rglob(suffix)
    ]
    assert len(files) > 300
    found = [file for file in files if any(name in file.read_text() for name in NAMES)]
    assert found == []
