"""Which graph a step with prefills replays."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from asyncllm.attention.base import DecodeRows, PrefillRows
from asyncllm.graphs.token_buffers import TokenBuffers

# (rows, the step's tokens) -> rows of the step's decodes, whose tokens are filled with it
ReadDecodes = Callable[[int, TokenBuffers], DecodeRows]
# Of the last step nothing may be read: a capture runs the step once, on whatever is there, and what
# that writes must go to the padding page.
Clear = Callable[[], object]
# The step's changes of slots, which its decodes read: before them.
WriteChanges = Callable[[], None]


class Way(enum.IntEnum):
    PIECES = 0  # attention is launched between them
    PREFILLS = 1  # one graph of prefills alone
    MIXED = 2  # one graph of both


class StepGraph(NamedTuple):
    num_tokens: int  # padding included
    way: Way

    @property
    def writes_changes(self) -> bool:
        """It begins with the step's changes of slots; if not, they must be written already."""
        return self.way is not Way.PIECES


class StepGraphs(Protocol):
    """Captured steps with prefills, by the number of their tokens."""

    def capture(self, size: int) -> None:
        """Capture one size on the current stream, between two steps; largest first saves memory."""
        ...

    def graph_of(self, num_decodes: int, prefills: PrefillRows) -> StepGraph | None:
        """What such a step replays; None: it has no graph."""
        ...

    def replay(
        self, graph: StepGraph, decode_positions: np.ndarray, prefills: PrefillRows
    ) -> torch.Tensor:
        """Run the step whose tokens are there: the buffer of hidden states, [size or more,
        hidden_size], which holds them until the next.

        decode_positions: int32 [decodes].
        """
        ...
