"""A container's quota decides how many threads are begun, wherever some are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncllm import host
from asyncllm.commands.doctor import examine
from asyncllm.config import EngineArgs
from asyncllm.engine.structured.compiler import MAX_FILL_THREADS, _num_fill_threads


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup folder on a machine of 64 cores, 16 of which this process may run on."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    return tmp_path


def test_cores_that_a_container_pays_for(cgroup: Path) -> None:
    assert host.num_cores() == 16
    quota = cgroup / "cpu.max"
    for text, expected in (
        ("max 100000\n", 16),
        ("350000 100000\n", 3),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 16),
    ):
        quota.write_text(text)
        assert host.num_cores() == expected
    quota.unlink()
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, expected in (("-1\n", 16), ("350000\n", 3)):
        (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(text)
        assert host.num_cores() == expected


def test_where_no_system_says_who_may_run_where(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host.num_cores() == 64
    (cgroup / "cpu.max").write_text("350000 100000\n")
    assert host.num_cores() == 3


def test_whoever_begins_threads_asks(cgroup: Path) -> None:
    assert _num_fill_threads() == MAX_FILL_THREADS
    (cgroup / "cpu.max").write_text("500000 100000\n")
    assert _num_fill_threads() == 2
    (cpu,) = (finding for finding in examine(EngineArgs()) if finding.name == "cpu")
    assert ", 5 cores, " in cpu.value


def test_a_pause_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [0]
    monkeypatch.setattr(host.time, "sleep", lambda seconds: turns.append(0))
    for _ in host.in_turns(range(5), 2):
        turns[-1] += 1
    assert turns == [2, 2, 1]
