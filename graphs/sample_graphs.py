"""Captured: logits and plain sampling of the rows of a mixed step, by their number.

Their hidden states are gathered into one buffer, whatever kind of step they come from; slots and
positions are where the step's arrays always are. Rows beyond the step's are padding: slot 0. As of
`DecodeGraphs`, outputs hold until the pool's next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncllm.graphs.captured_sizes import CapturedSizes
from asyncllm.graphs.pool import Graph, GraphPool, Outputs

# hidden [rows, hidden_size], slots and positions int32 [rows] -> tokens int32 [rows], logits
Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class SampleGraphs:
    """`sample` is captured for as many rows as calls of `capture` say."""

    def __init__(
        self,
        sample: Sample,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        pool: GraphPool,
    ) -> None:
        """hidden: [most rows, hidden_size], the buffer; slots, positions: int32 [most rows]."""
        self._sample = sample
        self._inputs = (hidden, slots, positions)
        self._pool = pool
        self._sizes = CapturedSizes()
        self._graphs: dict[int, tuple[Graph, Outputs]] = {}

    def capture(self, size: int) -> None:
        """Capture one size on the current stream; largest first saves memory."""
        hidden, slots, positions = (tensor[:size] for tensor in self._inputs)
        slots.zero_()  # those of the last step
        self._graphs[size] = self._pool.record(partial(self._sample, hidden, slots, positions))
        self._sizes.add(size)

    def takes(self, num_rows: int) -> bool:
        return self._sizes.fitting(num_rows) is not None

    def replay(self, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int32 [rows] and logits [rows, V] of hidden[rows], as many as it `takes`."""
        num_rows = len(rows)
        size = self._sizes.fitting(num_rows)
        assert size is not None, "more rows than it takes"
        torch.index_select(hidden, 0, rows, out=self._inputs[0][:num_rows])
        graph, (tokens, logits) = self._graphs[size]
        graph.replay()
        return tokens[:num_rows], logits[:num_rows]
