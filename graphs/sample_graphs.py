"""Captured: logits and plain sampling of the rows of a mixed step, by their number.

Hidden states are where captured steps leave them; which rows sample, their slots and positions are
where the step's arrays always are. So nothing is brought, but for an eager step, whose rows' hidden
states are copied there. Rows beyond the step's are padding: slot 0. As of `DecodeGraphs`, outputs
hold until the pool's next replay.
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
        rows: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        pool: GraphPool,
    ) -> None:
        """hidden: of a captured step's tokens, [as many as rows, or more, hidden_size]. rows: which
        of them sample; slots, positions: of what follows them; int32 [most rows]."""
        self._sample = sample
        self._hidden = hidden
        self._inputs = (rows, slots, positions)
        self._pool = pool
        self._sizes = CapturedSizes()
        self._graphs: dict[int, tuple[Graph, Outputs]] = {}

    def capture(self, size: int) -> None:
        """Capture one size on the current stream; largest first saves memory."""
        inputs = [tensor[:size] for tensor in self._inputs]
        for tensor in inputs:
            tensor.zero_()  # those of the last step
        self._graphs[size] = self._pool.record(partial(self._gather_and_sample, *inputs))
        self._sizes.add(size)

    def replay(self, hidden: torch.Tensor, num_rows: int) -> Outputs | None:
        """Tokens int32 [rows or more] and logits [rows or more, V] of the step's rows; None: it has
        no graph of as many.

        hidden: of the step's tokens, the buffer that graphs read or, of an eager step, another.
        """
        size = self._sizes.fitting(num_rows)
        if size is None:
            return None
        if hidden is not self._hidden:
            rows = self._inputs[0][:num_rows]
            torch.index_select(hidden, 0, rows, out=self._hidden[:num_rows])
            torch.arange(num_rows, out=rows)
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def _gather_and_sample(
        self, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> Outputs:
        return self._sample(self._hidden.index_select(0, rows), slots, positions)
