"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows from one static tensor and everything else from tensors indexed
by slot, so that a replay needs no copy while the same sequences run. Rows beyond the batch are
padding: slot 0. Graphs share memory: a replay's outputs hold until the pool's next. Where there are
several ways to run a step (decode_ways.py), a size is captured in each and its quickest graph kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from asyncllm.attention.device_trial import quickest
from asyncllm.graphs.captured_sizes import CapturedSizes
from asyncllm.graphs.decode_ways import LAYERS, DecodeStep, Trial, Way
from asyncllm.graphs.pool import Graph, GraphPool, Outputs
from asyncllm.types import PADDING_SLOT

logger = logging.getLogger("asyncllm")

Captured = tuple[Graph, Outputs]


class DecodeGraphs:
    """`step` is captured for sizes of up to `max_size` rows, by calls of `capture`."""

    def __init__(
        self,
        step: DecodeStep,
        max_size: int,
        pool: GraphPool,
        device: torch.device,
        others: Sequence[Way] = (),
        trial: Trial | None = None,
    ) -> None:
        """`step`: the model's layers. `trial` times them against the `others`, if there are any."""
        self._step = step
        self._others = list(others)
        self._trial = trial
        self._sizes = CapturedSizes()
        self.slots = torch.zeros(max_size, dtype=torch.int32, device=device)
        self._graphs: dict[int, Captured] = {}
        self._chosen: dict[int, str] = {}  # size -> the name of its way
        self._pool = pool
        self._held: np.ndarray | None = None  # what `slots` holds, as the host knows

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def ways(self) -> dict[str, list[int]]:
        """Name -> the captured sizes that are run so, ascending."""
        ways: dict[str, list[int]] = defaultdict(list)
        for size in self._sizes:
            ways[self._chosen[size]].append(size)
        return dict(ways)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream; largest first saves memory."""
        slots = self.slots[:size]
        slots.zero_()  # those of the last step: their pages may be others' by now
        self._held = None
        captured = {LAYERS: self._pool.record(partial(self._step, slots))}
        for way in [way for way in self._others if size in way.sizes]:
            try:
                captured[way.name] = self._pool.record(partial(way.step, slots))
            except RuntimeError as error:  # no engine fails to start for a faster kernel
                logger.warning("no decode step by %s: %s", way.name, error)
                self._others.remove(way)
        name = self._quickest(slots, captured)
        self._graphs[size], self._chosen[size] = captured[name], name
        self._sizes.add(size)

    def _quickest(self, slots: torch.Tensor, captured: dict[str, Captured]) -> str:
        """The name of one. The others' memory goes back to the pool with them."""
        names = list(captured)
        if len(names) == 1:
            return names[0]
        assert self._trial is not None, "several ways, and nothing to time them"
        seconds = self._trial(slots, [graph.replay for graph, _ in captured.values()])
        times = ", ".join(f"{n} {s * 1e3:.3f} ms" for n, s in zip(names, seconds, strict=True))
        logger.info("a decode step of %d rows: %s", len(slots), times)
        return names[quickest(seconds)]

    def padded_slots(self, slots: np.ndarray) -> np.ndarray | None:
        """`slots` int32 [rows] padded to the next captured size; None where none is as large."""
        size = self._sizes.fitting(len(slots))
        if size is None:
            return None
        padded = np.full(size, PADDING_SLOT, np.int32)
        padded[: len(slots)] = slots
        return padded

    def holds(self, padded: np.ndarray) -> bool:
        """Whether the static slots are these already, so that nothing needs to be copied."""
        return self._held is not None and np.array_equal(self._held, padded)

    def set_slots(self, padded: np.ndarray, uploaded: torch.Tensor) -> None:
        """The next replay's rows, uploaded to the device from `padded`."""
        self.slots[: len(padded)].copy_(uploaded)
        self._held = padded

    def replay(self, padded: np.ndarray) -> Outputs:
        """Run the step; its outputs have len(padded) rows and hold until the next replay."""
        assert self.holds(padded), "replay with other rows than set_slots was given"
        graph, outputs = self._graphs[len(padded)]
        graph.replay()
        return outputs
