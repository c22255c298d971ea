"""CUDA graphs that share one memory pool.

They may, because they run one after another on one stream and nobody reads a graph's outputs after
the next replay. Memory that one capture gave back is taken by the next, that of its outputs too: of
logits for 256 rows and less, a gigabyte if each size had its own. Capture the largest first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

Outputs = tuple[torch.Tensor, ...]
T = TypeVar("T")


class Graph(Protocol):
    """The part of `torch.cuda.CUDAGraph` that is used."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def pool(self) -> Any: ...


class Recorded(NamedTuple):
    """A captured graph and its outputs, which hold until the next replay in its pool."""

    graph: Graph
    outputs: Outputs

    def replay(self) -> Outputs:
        self.graph.replay()
        return self.outputs


class GraphPool:
    """`make_graph` is for tests: a fake that records."""

    def __init__(
        self,
        make_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
        clear: Callable[[], object] = lambda: None,
        before_capture: Callable[[], object] = lambda: None,
    ) -> None:
        """clear: called first of all: what a capture runs is on whatever is there, of which nothing
        may be the last step's, so that it writes to the padding page. before_capture: called after
        work has run as it is to be captured."""
        self._make_graph = make_graph
        self._clear = clear
        self._before_capture = before_capture
        self._pool: Any = None

    def record(self, run: Callable[[], Outputs]) -> Recorded:
        """One graph of `run`, and its outputs, which every replay writes again."""
        (graph,), outputs = self.record_pieces(lambda cut: run())
        return Recorded(graph, tuple(map(weak_alias, outputs)))

    def record_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[list[Graph], T]:
        """Graphs of `run`, which calls what it is given where one is to end and the next to begin;
        and what it returned.

        It runs once before: workspaces and compiled kernels that are made at their first use must
        exist before a capture. On the current stream, not the default one. Ends also where `run`
        raises. Not by `torch.cuda.graph`, which collects garbage and synchronises on each of 500
        entries.
        """
        self._clear()
        run(lambda: None)
        self._before_capture()
        graphs, pool = list[Graph](), self._pool

        def begin() -> None:
            graph = self._make_graph()
            # thread_local: another engine's thread may allocate pinned memory meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def end() -> None:
            nonlocal pool
            graphs[-1].capture_end()
            pool = graphs[-1].pool()

        def cut() -> None:
            end()
            begin()

        with _no_collection():
            begin()
            try:
                result = run(cut)
            finally:
                end()
        self._pool = pool
        return graphs, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage may hold other graphs, whose end is an error during a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _CudaArray:
    """CUDA's array interface to a tensor's memory, from its first number to its last, as bytes,
    since that knows no bfloat16: torch makes a tensor of it that does not own its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.itemsize if tensor.numel() else 0
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


def weak_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without owning it; off CUDA `tensor` itself.

    A graph's outputs are read where every replay writes them, while the pool may give their memory
    to graphs that are captured later. The graph keeps the pool, and the pool the memory.
    """
    if not tensor.is_cuda:
        return tensor
    memory = torch.as_tensor(_CudaArray(tensor), device=tensor.device)
    assert memory.data_ptr() == tensor.data_ptr(), "torch has copied it"
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
