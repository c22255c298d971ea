"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows from one static tensor and everything else from tensors indexed
by slot, so that a replay needs no copy while the same sequences run. Rows beyond the batch are
padding: slot 0. Graphs share memory: a replay's outputs hold until the pool's next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np
import torch

from asyncllm.graphs.pool import Graph, GraphPool
from asyncllm.types import PADDING_SLOT

# slots int32 [rows] -> outputs, tensors of `rows` rows
DecodeStep = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class DecodeGraphs:
    """`step` is captured for sizes of up to `max_size` rows, by calls of `capture`."""

    def __init__(
        self, step: DecodeStep, max_size: int, pool: GraphPool, device: torch.device
    ) -> None:
        self._step = step
        self._sizes: list[int] = []  # captured, ascending
        self.slots = torch.zeros(max_size, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[Graph, tuple[torch.Tensor, ...]]] = {}
        self._pool = pool
        self._held: np.ndarray | None = None  # what `slots` holds, as the host knows

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream; largest first saves memory."""
        slots = self.slots[:size]
        slots.zero_()  # those of the last step: their pages may be others' by now
        self._held = None
        self._step(slots)  # lazily made workspaces and compiled kernels must exist before capture
        with self._pool.capture() as capture:
            outputs = self._step(slots)
        self._graphs[size] = (capture.graphs[0], outputs)
        insort(self._sizes, size)

    def padded_slots(self, slots: np.ndarray) -> np.ndarray | None:
        """`slots` int32 [rows] padded to the next captured size; None where none is as large."""
        place = bisect_left(self._sizes, len(slots))
        if place == len(self._sizes):
            return None
        padded = np.full(self._sizes[place], PADDING_SLOT, np.int32)
        padded[: len(slots)] = slots
        return padded

    def holds(self, padded: np.ndarray) -> bool:
        """Whether the static slots are these already, so that nothing needs to be copied."""
        return self._held is not None and np.array_equal(self._held, padded)

    def set_slots(self, padded: np.ndarray, uploaded: torch.Tensor) -> None:
        """The next replay's rows, uploaded to the device from `padded`."""
        self.slots[: len(padded)].copy_(uploaded)
        self._held = padded

    def replay(self, padded: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Run the step; its outputs have len(padded) rows and hold until the next replay."""
        assert self.holds(padded), "replay with other rows than set_slots was given"
        graph, outputs = self._graphs[len(padded)]
        graph.replay()
        return outputs
