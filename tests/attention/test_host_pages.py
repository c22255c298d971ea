"""Host pages are pinned as long as somebody has them, on a driver that is not there."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch

from asyncllm.attention import host_pages
from asyncllm.attention.host_pages import HostPages

CUDA = torch.device("cuda")
SHAPE = (3, 2, 5)


class Runtime:
    """Knows what is pinned: address -> bytes."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.error:
            self.pinned[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_pinned_until_they_are_let_go_of(runtime: Runtime) -> None:
    pages = HostPages(SHAPE, torch.bfloat16, CUDA)
    tensor = pages.tensor
    assert tensor.shape == SHAPE and tensor.dtype is torch.bfloat16 and tensor.is_contiguous()
    assert runtime.pinned == {tensor.data_ptr(): tensor.nbytes}
    tensor.fill_(2.5)
    assert pages.tensor[2, 1, 4] == 2.5
    del tensor, pages
    assert not runtime.pinned


def test_what_cannot_be_pinned_is_the_drivers(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.error = 801
    asked: list[int] = []
    mapped: list[weakref.ref[mmap.mmap]] = []

    class Mapped(mmap.mmap):
        def __init__(self, *_: Any, **__: Any) -> None:
            mapped.append(weakref.ref(self))

    def by_driver(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        assert [memory() for memory in mapped] == [None]  # not there twice
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(host_pages, "_pinned_by_driver", by_driver)
    assert HostPages(SHAPE, torch.bfloat16, CUDA).tensor.shape == SHAPE
    assert asked == [60]


def test_no_pages_and_no_device_pin_nothing(runtime: Runtime) -> None:
    assert HostPages((0, 2, 5), torch.bfloat16, CUDA).tensor.shape == (0, 2, 5)
    assert HostPages(SHAPE, torch.float32, torch.device("cpu")).tensor.shape == SHAPE
    assert not runtime.pinned
