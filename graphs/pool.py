"""CUDA graphs that share one memory pool.

They may, because they run one after another on one stream and nobody reads a graph's outputs after
the next replay. Memory that one capture gave back is taken by the next: capture the largest first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """What is used of `torch.cuda.CUDAGraph`."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def pool(self) -> Any: ...


class GraphPool:
    """`make_graph` is for tests: a fake that records on the CPU."""

    def __init__(self, make_graph: Callable[[], Graph] = torch.cuda.CUDAGraph) -> None:
        self._make_graph = make_graph
        self._pool: Any = None

    def begin(self) -> Graph:
        """Capture what the current stream, not the default one, is given until `end`.

        Not `torch.cuda.graph`: it collects garbage and synchronises, 300 times in one start.
        """
        graph = self._make_graph()
        # thread_local: another engine's thread may allocate pinned memory meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: Graph) -> None:
        graph.capture_end()
        self._pool = graph.pool()
