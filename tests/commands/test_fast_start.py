"""A fast start begins work before torch is imported; the driver is a fake."""

from __future__ import annotations

import ctypes
import os
from threading import Event
from threading import enumerate as enumerate_threads

import pytest

from asyncllm.commands import fast_start
from tests.waiting import PATIENCE_SECONDS

IN_TREE = "TRITON_BACKENDS_IN_TREE"


class Driver:
    """Notes what it is asked; `failing` returns an error."""

    def __init__(self, failing: str | None = None) -> None:
        self.calls: list[str] = []
        self._failing = failing

    def _call(self, name: str) -> int:
        self.calls.append(name)
        return int(name == self._failing)

    def cuInit(self, flags: int) -> int:
        return self._call("init")

    def cuDeviceGet(self, device: object, number: int) -> int:
        assert number == 0
        return self._call("device")

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:
        return self._call("context")


@pytest.fixture(autouse=True)
def nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_start, "LAZY_PACKAGES", {})
    monkeypatch.setattr(fast_start, "hash_compiler", lambda: None)
    monkeypatch.setenv(IN_TREE, "")


def calls_with(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = fast_start.begin_fast_start("auto")
    assert thread is not None
    thread.join()
    return driver.calls


def test_a_context_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_with(Driver(), monkeypatch) == ["init", "device", "context"]


def test_what_fails_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_with(Driver("init"), monkeypatch) == ["init"]
    assert calls_with(Driver("device"), monkeypatch) == ["init", "device"]
    assert calls_with(Driver("context"), monkeypatch) == ["init", "device", "context"]


def test_triton_is_hashed_where_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Event()
    monkeypatch.setattr(fast_start, "hash_compiler", hashed.set)
    calls_with(Driver("device"), monkeypatch)
    assert "asyncllm-triton-key" not in {thread.name for thread in enumerate_threads()}
    assert not hashed.is_set()
    calls_with(Driver(), monkeypatch)
    assert hashed.wait(PATIENCE_SECONDS)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    thread = fast_start.begin_fast_start("cuda")
    assert thread is not None
    thread.join()  # an error in a thread fails a test


def test_triton_looks_for_no_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_start.begin_fast_start("cpu")
    assert os.environ[IN_TREE] == ""  # whoever set it is heard
    monkeypatch.delenv(IN_TREE)
    fast_start.begin_fast_start("cpu")
    assert os.environ[IN_TREE] == "1"


def test_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked for the driver"))
    assert fast_start.begin_fast_start("cpu") is None
