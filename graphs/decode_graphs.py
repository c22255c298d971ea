"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows where they always are and everything else from tensors indexed
by slot, so that a replay needs no copy while the same sequences run. Rows beyond the batch are
padding: slot 0. Graphs share memory: a replay's outputs hold until the pool's next. Few rows are
done by the persistent kernel where this start has it, because it is quicker (docs/log/decode.md);
else the model's layers run, one after another.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.kernels.persistent_decode import MAX_ROWS

logger = logging.getLogger("asyncllm")

LAYERS, PERSISTENT = "layers", "persistent"  # implementations

# slots int32 [rows] -> outputs, tensors of `rows` rows
DecodeStep = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class DecodeGraphs(SizedGraphs[Recorded]):
    """`step` is captured for sizes of up to as many rows as `slots` has."""

    def __init__(
        self,
        step: DecodeStep,
        slots: torch.Tensor,
        pool: GraphPool,
        persistent: DecodeStep | None = None,
    ) -> None:
        """`step`: by the model's layers. slots: int32, of a step's rows, 0 behind them. persistent:
        the same outputs by the persistent kernel, in its roundings; None: there is none."""
        super().__init__()
        self._step = step
        self._persistent = persistent
        self._is_broken = False  # the persistent one
        self.slots = slots
        self._names: dict[int, str] = {}  # size -> what it is captured from
        self._pool = pool

    @property
    def implementations(self) -> dict[str, list[int]]:
        """Name -> the captured sizes that are run so, ascending."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for size in self:
            sizes[self._names[size]].append(size)
        return dict(sizes)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream, between two steps; largest first saves memory."""
        persistent, slots = self._persistent, self.slots[:size]
        if persistent is not None and size <= MAX_ROWS and not self._is_broken:
            try:
                self._add(size, PERSISTENT, self._pool.record(partial(persistent, slots)))
                return
            except RuntimeError as error:  # no engine fails to start for a faster kernel
                logger.warning("no persistent decode step: %s", error)
                self._is_broken = True  # but kept: graphs of other sizes use what it has
        self._add(size, LAYERS, self._pool.record(partial(self._step, slots)))

    def _add(self, size: int, name: str, captured: Recorded) -> None:
        self._names[size] = name
        self.add(size, captured)

    def logits(self, size: int) -> torch.Tensor:
        """The buffer in which the step of this size leaves its logits: [size, V]."""
        return self[size].outputs[1]
