"""Which implementation of a decode step is kept, size by size; graphs are recordings."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from asyncllm.graphs.decode_graphs import LAYERS, DecodeGraphs, DecodeKernel, DecodeStep
from asyncllm.graphs.pool import GraphPool
from asyncllm.kernels.autotune import LEAST_GAIN, quickest
from tests.worker.recorded_graph import RecordedGraph

Times = dict[int, list[float]]  # size -> seconds, the layers' first


def test_the_layers_stay_unless_another_is_clearly_quicker() -> None:
    assert quickest([1.0]) == 0
    assert quickest([1.0, 1.0]) == 0
    assert quickest([1.0, 1.0 - LEAST_GAIN / 2]) == 0
    assert quickest([1.0, 0.9]) == 1
    assert quickest([1.0, 0.9, 0.8]) == 2
    assert quickest([1.0, 1.1, 2.0]) == 0


def plus(number: int, seen: list[int]) -> DecodeStep:
    """A step that shows which it is: its slots plus a number. `seen`: the sizes it ran with."""

    def step(slots: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(len(slots))
        return (slots + number,)

    return step


def timed(times: Times) -> Callable[[torch.Tensor, Sequence[Callable[[], None]]], list[float]]:
    def autotune(slots: torch.Tensor, replays: Sequence[Callable[[], None]]) -> list[float]:
        for replay in replays:
            replay()
        assert len(replays) == len(times[len(slots)])
        return times[len(slots)]

    return autotune


def slots(
    number: int, make_graph: Callable[[], RecordedGraph] = RecordedGraph
) -> tuple[torch.Tensor, GraphPool]:
    """So many, and a pool that clears them."""
    tensor = torch.zeros(number, dtype=torch.int32)
    return tensor, GraphPool(make_graph, clear=tensor.zero_)


def run(graphs: DecodeGraphs, size: int) -> int:
    """How much the implementation of this size adds to a slot."""
    assert graphs.fitting(size) == size
    graphs.slots[:size] = torch.arange(1, size + 1)
    (output,) = graphs[size].replay()
    assert (output - graphs.slots[:size]).unique().numel() == 1
    return int(output[0]) - 1


def test_each_size_has_its_quickest(caplog: pytest.LogCaptureFixture) -> None:
    sizes: dict[str, list[int]] = {"layers": [], "few": [], "even": []}
    times = {1: [0.3, 0.2], 2: [0.2, 0.3, 0.4], 4: [0.5, 0.4, 0.3]}
    graphs = DecodeGraphs(
        plus(100, sizes["layers"]),
        *slots(8),
        [
            DecodeKernel("few", plus(200, sizes["few"]), range(1, 5)),
            DecodeKernel("even", plus(300, sizes["even"]), range(2, 7, 2)),
        ],
        timed(times),
    )
    with caplog.at_level(logging.INFO, "asyncllm"):
        for size in (8, 4, 2, 1):
            graphs.capture(size)
    assert graphs.implementations == {"few": [1], LAYERS: [2, 8], "even": [4]}
    assert [run(graphs, size) for size in (1, 2, 4, 8)] == [200, 100, 300, 100]
    twice = [size for size in (8, 4, 2, 1) for _ in range(2)]  # before and in the capture
    assert sizes == {"layers": twice, "few": twice[2:], "even": twice[2:6]}
    assert caplog.messages == [
        "a decode step of 4 rows: layers 500.000 ms, few 400.000 ms, even 300.000 ms",
        "a decode step of 2 rows: layers 200.000 ms, few 300.000 ms, even 400.000 ms",
        "a decode step of 1 rows: layers 300.000 ms, few 200.000 ms",
    ]


def test_who_was_timed_and_not_kept_is_gone() -> None:
    made: list[weakref.ref[RecordedGraph]] = []

    def make_graph() -> RecordedGraph:
        graph = RecordedGraph()
        made.append(weakref.ref(graph))
        return graph

    other = DecodeKernel("other", plus(2, []), range(1, 9))
    graphs = DecodeGraphs(plus(1, []), *slots(4, make_graph), [other], timed({4: [1, 2]}))
    graphs.capture(4)
    layers, other = made
    assert layers() is not None and other() is None


def test_what_a_kept_graph_uses_stays_where_its_way_fails_for_another_size(
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
    others = [DecodeKernel("other", buffers.step, range(1, 9))]
    autotune = timed({4: [2, 1]})
    graphs = DecodeGraphs(plus(1, []), *slots(4), others, autotune)
    graphs.capture(4)
    del buffers, others
    graphs.capture(2)
    assert graphs.implementations == {LAYERS: [2], "other": [4]} and used() is not None


def test_a_way_that_fails_is_left_out_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def broken(slots: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        raise RuntimeError("CUDA error 720")

    other = DecodeKernel("broken", broken, range(1, 9))
    graphs = DecodeGraphs(plus(1, []), *slots(4), [other])
    for size in (4, 2):
        graphs.capture(size)
    assert graphs.implementations == {LAYERS: [2, 4]} and calls == 1
    assert caplog.messages == ["no decode step by broken: CUDA error 720"]
    assert run(graphs, 2) == 1
