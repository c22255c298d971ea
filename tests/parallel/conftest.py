"""Ranks and engines are forked from a process that has the imports, but where a test is about their
start."""

from __future__ import annotations

import pytest

from asyncllm.engine.data_parallel import spawn
from asyncllm.worker.ranks import processes
from tests import forked_start


@pytest.fixture(autouse=True)
def _forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "true_start" not in request.keywords:
        for module in (processes, spawn):
            monkeypatch.setattr(module, "start_child", forked_start.start_child)
