"""Adapters come to host memory by one thread, and to their slots in pieces between steps."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asyncllm.models.layers.linear_method import LinearShape
from asyncllm.models.layers.lora import LoRALayers
from asyncllm.models.lora_adapter import AdapterInfo
from asyncllm.step_plan import StepShape
from asyncllm.types import StepResult
from asyncllm.worker import adapters
from asyncllm.worker.adapters import AdapterStore
from asyncllm.worker.executor import Executor, Work

NUM_PLACES, NUM_SLOTS = 2, 3


class FakeStream:
    """Does a step's work when it is waited for. Asserts that nothing is behind it by then."""

    def __init__(self) -> None:
        self.num_waiting, self.copied = 0, []

    def submit(self, work: Work, shape: StepShape) -> Any:
        self.num_waiting += 1
        assert self.num_waiting == 1, "a piece is submitted before the one in front of it is copied"

        async def wait() -> StepResult:
            await asyncio.sleep(0)
            self.num_waiting -= 1
            return work()()

        return SimpleNamespace(wait=wait)


def store_of(num_layers: int, stream: FakeStream) -> tuple[AdapterStore, LoRALayers]:
    layers = LoRALayers(NUM_SLOTS, 8, torch.float32, torch.device("cpu"))
    for layer in range(num_layers):
        layers.layer(LinearShape({f"layers.{layer}": 32}, 16, bias=False))
    layers.allocate()
    return AdapterStore(layers, NUM_PLACES, cast(Executor, stream)), layers


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.nbytes.append(args[0].nbytes)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_layers", [1, 50])
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_a_load_is_as_few_copies_as_its_bytes_are_pieces(
    num_layers: int, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of tensors; and each behind the step that ran meanwhile."""
    store, layers = store_of(num_layers, FakeStream())
    slot = layers.slots[0]
    elements = -(-len(slot) // num_pieces)
    monkeypatch.setattr(adapters, "PIECE_BYTES", elements * slot.itemsize)
    (_, places) = store._parts[0]
    places.copy_(torch.randn(places.shape))
    with Copies() as copies:
        asyncio.run(store.load(1, 2))
    assert len(copies.nbytes) == num_pieces and sum(copies.nbytes) == slot.nbytes
    assert max(copies.nbytes) <= adapters.PIECE_BYTES
    assert torch.equal(layers.slots[2], places[1])
    assert not layers.slots[[0, 1, 3]].any()
    store.close()


def test_files_are_read_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever threads ask; and no other thread has fewer for that."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        store, _ = store_of(1, FakeStream())
        readers: list[tuple[int, threading.Thread]] = []

        def read(*_: Any, **__: Any) -> AdapterInfo:
            torch.ones(1 << 16).exp_()  # an operation that could have more
            readers.append((torch.get_num_threads(), threading.current_thread()))
            return AdapterInfo(b"", 8)

        monkeypatch.setattr(adapters, "read_adapter", read)
        with ThreadPoolExecutor(3) as others:
            others_numbers = [others.submit(torch.get_num_threads) for _ in range(3)]
            for place in range(NUM_PLACES):
                others.submit(store.read, Path(), place).result()
            assert [each.result() for each in others_numbers] == [3] * 3
        assert torch.get_num_threads() == 3
        assert [number for number, _ in readers] == [1] * NUM_PLACES
        assert len({thread for _, thread in readers}) == 1
        store.close()
        assert not readers[0][1].is_alive()
    finally:
        torch.set_num_threads(before)
