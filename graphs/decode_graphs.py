"""Captured decode steps: one CUDA graph per batch size.

A graph reads the slots of its rows where they always are and everything else from tensors indexed
by slot, so that a replay needs no copy while the same sequences run. Rows beyond the batch are
padding: slot 0. Graphs share memory: a replay's outputs hold until the pool's next. Where a step
has several implementations (decode_kernels.py), a size is captured in each and its quickest kept.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch

from asyncllm.graphs.decode_kernels import LAYERS, Autotune, DecodeKernel, DecodeStep
from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import Clear
from asyncllm.kernels.autotune import quickest

logger = logging.getLogger("asyncllm")


class DecodeGraphs(SizedGraphs[Recorded]):
    """`step` is captured for sizes of up to as many rows as `slots` has."""

    def __init__(
        self,
        step: DecodeStep,
        slots: torch.Tensor,
        clear: Clear,
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
        self._clear = clear
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
        self._clear()
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
