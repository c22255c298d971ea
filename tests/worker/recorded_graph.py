"""A CUDA graph's stand-in for the CPU: it records torch's operations and runs them again.

Replay computes every operation anew from what its input tensors hold by then, and puts the results
into the tensors of the recording. As with a graph, whatever was not a tensor (a size that the host
read) is as it was at capture; but how many rows a condition selects may differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncllm.graphs.pool import GraphPool, Outputs, Recorded

GARBAGE = 77  # a token and a logit


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(outputs)))
        return outputs


class RecordedGraph:
    """Graphs must be replayed in the order of their capture, as pieces of one step."""

    open: ClassVar[int] = 0  # captures begun and not ended

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert RecordedGraph.open == 0, "a stream captures one graph at a time"
        assert not gc.isenabled()
        RecordedGraph.open += 1
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        RecordedGraph.open -= 1
        self._recorder.__exit__(None, None, None)

    def replay(self) -> None:
        assert RecordedGraph.open == 0
        for func, args, kwargs, outputs in self._recorder.calls:
            for old, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor):
                    if old.shape != new.shape:
                        old.resize_(new.shape)
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def pool(self) -> Any:
        return "the pool"

    def reset(self) -> None:
        self._recorder.calls.clear()


class ForgetfulGraph(RecordedGraph):
    """`others`: outputs that are lost when it runs, as their memory is shared."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        self._others = others

    def replay(self) -> None:
        for tensor in self._others:
            tensor.fill_(GARBAGE)
        super().replay()


class ForgetfulPool(GraphPool):
    """A pool of recorded graphs: whichever runs, the outputs of all are lost."""

    def __init__(self, **hooks: Callable[[], object]) -> None:
        self._outputs: list[torch.Tensor] = []
        super().__init__(partial(ForgetfulGraph, self._outputs), **hooks)

    def record(self, run: Callable[[], Outputs]) -> Recorded:
        recorded = super().record(run)
        self._outputs.extend(recorded.outputs)
        return recorded
