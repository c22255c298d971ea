"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows where they always are and everything else from tensors indexed
by slot, so that a replay needs no copy while the same sequences run. Rows beyond the batch are
padding: slot 0. Graphs share memory: a replay's outputs hold until the pool's next. Where a step
has implementations besides the model's layers, one after another, a size is captured in each that
takes it and the quickest is kept (kernels/autotune.py).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.kernels.autotune import quickest

logger = logging.getLogger("asyncllm")

LAYERS = "layers"

# slots int32 [rows] -> outputs, tensors of `rows` rows
DecodeStep = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
# (slots int32 [rows] that graphs read, the graphs' replays) -> seconds that each of them takes
Autotune = Callable[[torch.Tensor, Sequence[Callable[[], None]]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """`step` gives the same outputs as the layers', in the roundings of other kernels."""

    name: str
    step: DecodeStep
    sizes: range  # rows that it takes; the layers take every number


class DecodeGraphs(SizedGraphs[Recorded]):
    """`step` is captured for sizes of up to as many rows as `slots` has."""

    def __init__(
        self,
        step: DecodeStep,
        slots: torch.Tensor,
        pool: GraphPool,
        others: Sequence[DecodeKernel] = (),
        autotune: Autotune | None = None,
    ) -> None:
        """`step`: the model's layers. slots: int32, of a step's rows, 0 behind them.
        `autotune` times the layers against the `others`, if there are any."""
        super().__init__()
        self._step = step
        self._others = others
        self._broken: set[str] = set()  # of the others, by name
        self._autotune = autotune
        self.slots = slots
        self._chosen: dict[int, str] = {}  # size -> the name of its implementation
        self._pool = pool

    @property
    def implementations(self) -> dict[str, list[int]]:
        """Name -> the captured sizes that are run so, ascending."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for size in self:
            sizes[self._chosen[size]].append(size)
        return dict(sizes)

    def capture(self, size: int) -> None:
        """Capture one size on the current stream, between two steps; largest first saves memory."""
        slots = self.slots[:size]
        captured = {LAYERS: self._pool.record(partial(self._step, slots))}
        for other in self._others:
            if size not in other.sizes or other.name in self._broken:
                continue
            try:
                captured[other.name] = self._pool.record(partial(other.step, slots))
            except RuntimeError as error:  # no engine fails to start for a faster kernel
                logger.warning("no decode step by %s: %s", other.name, error)
                self._broken.add(other.name)  # but kept: graphs of other sizes use what it has
        self._chosen[size] = name = self._quickest(slots, captured)
        self.add(size, captured[name])

    def _quickest(self, slots: torch.Tensor, captured: dict[str, Recorded]) -> str:
        """The name of one. The others' memory goes back to the pool with them."""
        names = list(captured)
        if len(names) == 1:
            return names[0]
        assert self._autotune is not None, "several implementations, and nothing to time them"
        seconds = self._autotune(slots, [each.graph.replay for each in captured.values()])
        times = ", ".join(f"{n} {s * 1e3:.3f} ms" for n, s in zip(names, seconds, strict=True))
        logger.info("a decode step of %d rows: %s", len(slots), times)
        return names[quickest(seconds)]

    def logits(self, size: int) -> torch.Tensor:
        """The buffer in which the step of this size leaves its logits: [size, V]."""
        return self[size].outputs[1]
