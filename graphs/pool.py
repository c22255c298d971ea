"""CUDA graphs that share one memory pool.

They may, because they run one after another on one stream and nobody reads a graph's outputs after
the next replay. Memory that one capture gave back is taken by the next, that of its outputs too: of
logits for 256 rows and less, a gigabyte if each size had its own. Capture the largest first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from asyncllm.graphs.unowned import unowned

Outputs = tuple[torch.Tensor, ...]


class Graph(Protocol):
    """What is used of `torch.cuda.CUDAGraph`."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def pool(self) -> Any: ...


class Capture:
    """Graphs, one after another, of what the current stream is given; the last one is open."""

    def __init__(self, make_graph: Callable[[], Graph], pool: Any) -> None:
        self._make_graph = make_graph
        self.pool = pool
        self.graphs: list[Graph] = []

    def begin(self) -> None:
        graph = self._make_graph()
        # thread_local: another engine's thread may allocate pinned memory meanwhile.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        self.graphs[-1].capture_end()
        self.pool = self.graphs[-1].pool()

    def cut(self) -> None:
        """End this graph, begin the next."""
        self.end()
        self.begin()


class GraphPool:
    """`before_capture` is called before each, `make_graph` is for tests: a fake that records."""

    def __init__(
        self,
        make_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
        before_capture: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_graph = make_graph
        self._before_capture = before_capture
        self._pool: Any = None

    def record(self, run: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        """One graph of `run`, and its outputs, which every replay writes again: they hold until the
        pool's next, whichever graph's.

        It runs once before: workspaces and compiled kernels that are made at their first use must
        exist before a capture.
        """
        run()
        with self.capture() as capture:
            outputs = run()
        (graph,) = capture.graphs
        return graph, tuple(map(unowned, outputs))

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Capture on the current stream, not the default one. Ends also where the work raises.

        Not `torch.cuda.graph`, which collects garbage and synchronises on each of 500 entries.
        Garbage must not be collected within, though: it may hold other graphs, whose end is an
        error during a capture.
        """
        self._before_capture()
        collecting = gc.isenabled()
        gc.disable()
        capture = Capture(self._make_graph, self._pool)
        try:
            capture.begin()
            try:
                yield capture
            finally:
                capture.end()
            self._pool = capture.pool
        finally:
            if collecting:
                gc.enable()
