"""Which implementation a decode step is captured from; graphs are recordings."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from asyncllm.graphs.decode_graphs import LAYERS, PERSISTENT, DecodeGraphs, DecodeStep
from asyncllm.graphs.pool import GraphPool
from tests.worker.recorded_graph import RecordedGraph


def plus(number: int, seen: list[int]) -> DecodeStep:
    """A step that shows which it is: its slots plus a number. `seen`: the sizes it ran with."""

    def step(slots: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(len(slots))
        return (slots + number,)

    return step


def slots(number: int) -> tuple[torch.Tensor, GraphPool]:
    """So many, and a pool that clears them."""
    tensor = torch.zeros(number, dtype=torch.int32)
    return tensor, GraphPool(RecordedGraph, clear=tensor.zero_)


def run(graphs: DecodeGraphs, size: int) -> int:
    """How much the implementation of this size adds to a slot."""
    assert graphs.fitting(size) == size
    graphs.slots[:size] = torch.arange(1, size + 1)
    (output,) = graphs[size].replay()
    assert (output - graphs.slots[:size]).unique().numel() == 1
    return int(output[0]) - 1


def test_the_persistent_kernel_has_the_sizes_that_it_takes() -> None:
    by_layers: list[int] = []
    by_kernel: list[int] = []
    graphs = DecodeGraphs(plus(100, by_layers), *slots(16), plus(200, by_kernel))
    for size in (16, 8, 2, 1):
        graphs.capture(size)
    assert graphs.implementations == {PERSISTENT: [1, 2, 8], LAYERS: [16]}
    assert [run(graphs, size) for size in (1, 2, 8, 16)] == [200, 200, 200, 100]
    assert (by_layers, by_kernel) == ([16, 16], [8, 8, 2, 2, 1, 1]), "before and in the capture"


def test_what_a_graph_uses_stays_where_its_kernel_fails_for_another_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph knows no more than addresses."""
    caplog.set_level(logging.ERROR, "asyncllm")  # a record would keep all that its error has seen

    class Buffers:
        def step(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if len(slots) == 2:
                raise RuntimeError("no memory")
            return (slots + 2,)

    buffers = Buffers()
    used = weakref.ref(buffers)
    graphs = DecodeGraphs(plus(1, []), *slots(4), buffers.step)
    graphs.capture(4)
    del buffers
    graphs.capture(2)
    assert graphs.implementations == {LAYERS: [2], PERSISTENT: [4]} and used() is not None


def test_a_kernel_that_fails_is_left_out_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def broken(slots: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        raise RuntimeError("CUDA error 720")

    graphs = DecodeGraphs(plus(1, []), *slots(4), broken)
    for size in (4, 2):
        graphs.capture(size)
    assert graphs.implementations == {LAYERS: [2, 4]} and calls == 1
    assert caplog.messages == ["no persistent decode step: CUDA error 720"]
    assert run(graphs, 2) == 1


def test_a_failure_is_an_error_where_other_ranks_would_wait() -> None:
    def broken(slots: torch.Tensor) -> tuple[torch.Tensor]:
        raise RuntimeError("CUDA error 720")

    graphs = DecodeGraphs(plus(1, []), *slots(4), broken, may_fail=False)
    with pytest.raises(RuntimeError, match="720"):
        graphs.capture(4)
