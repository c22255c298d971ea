"""A step is padded to the least size that was captured and holds it."""

from __future__ import annotations

from asyncllm.graphs.sized_graphs import SizedGraphs


def test_the_least_that_holds_it() -> None:
    graphs = SizedGraphs[str]()
    assert graphs.fitting(1) is None
    for size in (8, 2, 4):
        graphs.add(size, str(size))
    assert list(graphs) == [2, 4, 8] and len(graphs) == 3
    assert [graphs.fitting(number) for number in (0, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, None]
    assert graphs[4] == "4" and 4 in graphs and 5 not in graphs
