"""Captured: a decode step's tokens, sampled again by masks that came after its launch.

One CUDA graph per batch size, as of the steps themselves. It has a pool of its own: what it
computes must not lie where the logits are that it reads, which are a step's outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.graphs.pool import Graph, GraphPool

# logits [rows, V], slots int32 [rows] -> tokens int32 [rows]
Resample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MaskedGraphs:
    """`resample` is captured for the sizes of `steps` that calls of `capture` say."""

    def __init__(self, resample: Resample, steps: DecodeGraphs, pool: GraphPool) -> None:
        """pool: none that another user's graphs share."""
        self._resample = resample
        self._steps = steps
        self._pool = pool
        self._graphs: dict[int, tuple[Graph, torch.Tensor]] = {}

    def capture(self, size: int) -> None:
        """Right after the step of this size, on the same stream."""
        logits, slots = self._steps.logits(size), self._steps.slots[:size]
        graph, (tokens,) = self._pool.record(lambda: (self._resample(logits, slots),))
        self._graphs[size] = graph, tokens

    def __contains__(self, size: int) -> bool:
        return size in self._graphs

    def replay(self, size: int) -> torch.Tensor:
        """Tokens int32 [size] of the step of this size, the last that ran. They hold until the next
        replay."""
        graph, tokens = self._graphs[size]
        graph.replay()
        return tokens
