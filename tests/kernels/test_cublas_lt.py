"""Objects of cuBLASLt are made, given back and asked for, with a library of the test."""

from __future__ import annotations

import weakref
from ctypes import c_void_p
from typing import Any

import pytest
import torch

from asyncllm.kernels.gemm import cublas_lt
from asyncllm.kernels.gemm.cublas_lt import CublasLt, Shape

CPU = torch.device("cpu")


class Library:
    """Numbers what it makes."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self.num_made = 0

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Create"):
            return self.create
        if name.endswith("Destroy"):
            return self.destroy
        if name.startswith("cublasLt"):
            return lambda *_: 0
        raise AttributeError(name)

    def create(self, made: Any, *_: object) -> int:
        self.num_made += 1
        made._obj.value = self.num_made
        self.alive.append(self.num_made)
        return 0

    def destroy(self, of: c_void_p) -> int:
        assert of.value is not None
        self.alive.remove(of.value)
        return 0


def test_what_is_made_once_lives_as_long_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(cublas_lt, "_library", lambda: library)
    ours = CublasLt(torch.bfloat16, CPU)
    before = len(library.alive)
    for _ in range(2):
        assert ours.can_run(Shape(4, 5, 6), bytes(64))
        assert ours.algorithms(Shape(4, 5, 6)) == []
    assert len(library.alive) == before + 3  # a layout each of weight, x and result
    assert not ours.can_run(Shape(4, 5, 7), bytes(63))
    assert len(library.alive) == before + 3
    del ours
    assert library.alive == []


def test_an_exit_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would to destroy a handle: what the process still has is left to the system."""
    ends: list[weakref.finalize[..., c_void_p]] = []

    class End(weakref.finalize):  # type: ignore[type-arg]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            ends.append(self)

    monkeypatch.setattr(cublas_lt, "_library", Library)
    monkeypatch.setattr(weakref, "finalize", End)
    ours = CublasLt(torch.bfloat16, CPU)
    assert ours.can_run(Shape(4, 5, 6), bytes(64))
    assert len(ends) == 5 and all(end.alive and not end.atexit for end in ends)
