"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows where they always are and everything else from tensors indexed
by slot, so that a replay needs no copy while the same sequences run. Rows beyond the batch are
padding: slot 0. Graphs share memory: a replay's outputs hold until the pool's next. Where there are
several implementations (decode_kernels.py), a size is captured in each and its quickest graph kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch

from asyncllm.graphs.captured_sizes import CapturedSizes
from asyncllm.graphs.decode_kernels import LAYERS, Autotune, DecodeKernel, DecodeStep
from asyncllm.graphs.pool import Graph, GraphPool, Outputs
from asyncllm.graphs.step_graph import Clear
from asyncllm.kernels.autotune import quickest

logger = logging.getLogger("asyncllm")

Captured = tuple[Graph, Outputs]


class DecodeGraphs:
    """`step` is captured for sizes of up to as many rows as `slots` has, by calls of `capture`."""

    def __init__(
        self,
        step: DecodeStep,
        slots: torch.Tensor,
        clear: Clear,
        pool: GraphPool,
        others: Sequence[DecodeKernel] = (),
        trial: Autotune | None = None,
    ) -> None:
        """`step`: the model's layers. slots: int32, of a step's rows, 0 behind them. `trial` times
        the layers against the `others`, if there are any."""
        self._step = step
        self._others = others
        self._broken: set[str] = set()  # of the others, by name
        self._trial = trial
        self._sizes = CapturedSizes()
        self.slots = slots
        self._clear = clear
        self._graphs: dict[int, Captured] = {}
        self._chosen: dict[int, str] = {}  # size -> the name of its way
        self._pool = pool

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
        self._clear()
        captured = {LAYERS: self._pool.record(partial(self._step, slots))}
        for way in self._others:
            if size not in way.sizes or way.name in self._broken:
                continue
            try:
                captured[way.name] = self._pool.record(partial(way.step, slots))
            except RuntimeError as error:  # no engine fails to start for a faster kernel
                logger.warning("no decode step by %s: %s", way.name, error)
                self._broken.add(way.name)  # but kept: graphs of other sizes use what it has
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

    def fitting(self, num_rows: int) -> int | None:
        """The captured size that so many rows are padded to; None where none is as large."""
        return self._sizes.fitting(num_rows)

    def logits(self, size: int) -> torch.Tensor:
        """Where the step of this size leaves its logits: [size, V]."""
        _, (_, logits) = self._graphs[size]
        return logits

    def replay(self, size: int) -> Outputs:
        """Run the step of the slots that are there; its outputs have `size` rows and hold until the
        next replay."""
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs
