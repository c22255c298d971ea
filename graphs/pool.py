"""CUDA graphs that share a memory pool.

They can share it because they run one after another on one stream, and a graph's outputs are not
read after the next replay. A capture reuses the memory of the ones before, including their outputs:
separate logits for all sizes up to 256 rows would take a gigabyte. Capture the largest size first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from asyncllm.host import no_collection

Outputs = tuple[torch.Tensor, ...]
T = TypeVar("T")


class Graph(Protocol):
    """The used part of `torch.cuda.CUDAGraph`."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def pool(self) -> Any: ...
    def reset(self) -> None: ...


class Recorded(NamedTuple):
    """A captured graph and its outputs, which are valid until the next replay in its pool."""

    graph: Graph
    outputs: Outputs

    def replay(self) -> Outputs:
        self.graph.replay()
        return self.outputs


class GraphPool:
    """make_graph: a fake for tests."""

    def __init__(
        self,
        make_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
        clear: Callable[[], object] = lambda: None,
        before_capture: Callable[[], object] = lambda: None,
    ) -> None:
        """clear: called first. A capture runs on whatever its inputs hold, so it clears them, and
        work writes to the padding page. before_capture: called after the work has run once, right
        before it is captured."""
        self._make_graph = make_graph
        self._clear = clear
        self._before_capture = before_capture
        self._pool: Any = None
        self._graphs: list[Graph] = []

    def record(self, run: Callable[[], Outputs]) -> Recorded:
        """Capture `run` in one graph. Every replay writes its outputs again."""
        (graph,), outputs = self.record_pieces(lambda cut: run())
        return Recorded(graph, tuple(map(weak_alias, outputs)))

    def reset(self) -> None:
        """Destroy all graphs, whoever still refers to one: none is replayed any more."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def record_pieces(self, run: Callable[[Callable[[], None]], T]) -> tuple[list[Graph], T]:
        """Capture `run` in several graphs: `run` calls its argument where one ends and the next
        begins. Also returns the result of `run`.

        `run` is called once before the capture, to create workspaces and compile kernels. The
        current stream must not be the default one. The capture also ends if `run` raises. It does
        not use `torch.cuda.graph`, which collects garbage and synchronises at each of 500 entries.
        """
        self._clear()
        run(lambda: None)
        self._before_capture()
        graphs, pool = list[Graph](), self._pool

        def begin() -> None:
            graph = self._make_graph()
            # thread_local: threads of other engines may allocate pinned memory meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            graphs.append(graph)
            self._graphs.append(graph)

        def end() -> None:
            nonlocal pool
            graphs[-1].capture_end()
            pool = graphs[-1].pool()

        def cut() -> None:
            end()
            begin()

        with no_collection():  # destroying another graph during a capture is an error
            begin()
            try:
                result = run(cut)
            finally:
                end()
        self._pool = pool
        return graphs, result


class _CudaArray:
    """A tensor's memory, from its first to its last element, by CUDA's array interface, of which
    torch makes a tensor that does not own it. As bytes, because the interface has no bfloat16."""

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
    """A tensor with the same memory that does not own it; on a CPU `tensor` itself.

    So the pool may give the memory of a graph's outputs to later captures, although the outputs can
    still be read after a replay. The graph keeps the pool alive, and the pool the memory.
    """
    if not tensor.is_cuda:
        return tensor
    memory = torch.as_tensor(_CudaArray(tensor), device=tensor.device)
    assert memory.data_ptr() == tensor.data_ptr(), "torch copied the tensor"
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
