"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows from the static inputs and all else from tensors indexed by
slot, so a replay needs no copy while the same sequences run. Rows after the batch are padding: slot
0. Graphs share memory: outputs are valid until the next replay. Small batches use the persistent
kernel if it is available, which is faster (docs/log/decode.md); others run the model's layers one
after another.
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
    """Graphs of up to as many rows as `slots` has."""

    def __init__(
        self,
        step: DecodeStep,
        slots: torch.Tensor,
        pool: GraphPool,
        persistent: DecodeStep | None = None,
        *,
        may_fail: bool = True,
    ) -> None:
        """step: runs the model's layers. slots: int32, those of a step's rows, then zeros.
        persistent: the same step by the persistent kernel, whose rounding differs; None: it is not
        available. may_fail: the layers do what it fails to capture; not where other ranks' kernels
        would wait for this one's."""
        super().__init__()
        self._step = step
        self._persistent = persistent
        self._may_fail = may_fail
        self._is_broken = False  # whether capturing the persistent step has failed
        self.slots = slots
        self._names: dict[int, str] = {}  # size -> implementation
        self._pool = pool

    @property
    def implementations(self) -> dict[str, list[int]]:
        """Implementation -> the sizes captured with it, ascending."""
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
            except RuntimeError as error:  # the layers can do it, too
                if not self._may_fail:
                    raise
                logger.warning("no persistent decode step: %s", error)
                self._is_broken = True  # `_persistent` is kept: captured graphs use its memory
        self._add(size, LAYERS, self._pool.record(partial(self._step, slots)))

    def _add(self, size: int, name: str, captured: Recorded) -> None:
        self._names[size] = name
        self.add(size, captured)

    def logits(self, size: int) -> torch.Tensor:
        """The buffer of this size's logits: [size, V]."""
        return self[size].outputs[1]
