"""Times captured decode steps against each other, on rows of a usual length.

The rows are those of slots that no request has: before the start's end, or while nothing runs. Each
reads pages of its own, whatever they hold, as a served row would, and writes to the padding page:

    block table   page page ... page | padding page       a position: the first of the padding page
    tokens        0                  position
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from asyncllm.kernels.autotune import alternated_seconds
from asyncllm.types import PADDING_PAGE
from asyncllm.worker.device_state import DeviceState

CONTEXT_TOKENS = 512  # at most; a whole number of pages
NUM_ROUNDS = 5

Replay = Callable[[], None]


class DecodeAutotune:
    """An `Autotune`, on the current CUDA stream, for rows that the state has slots for."""

    def __init__(self, state: DeviceState, block_size: int, num_pages: int) -> None:
        """`num_pages`: usable ones, from 1."""
        self._state = state
        self._num_pages = num_pages
        # The last page of a table is where the new token goes.
        self._row_pages = min(CONTEXT_TOKENS // block_size, state.block_tables.shape[2] - 1)
        self._position = self._row_pages * block_size

    def __call__(self, slots: torch.Tensor, replays: Sequence[Replay]) -> list[float]:
        """The quickest of NUM_ROUNDS, in which the graphs alternate, in seconds.

        Whoever held the GIL or the clock for a while spoils one time of several.
        """
        with self._rows(slots) as positions:
            a_step_moves_on = partial(positions.fill_, self._position)
            rounds = alternated_seconds(replays, NUM_ROUNDS, a_step_moves_on)
        return [min(seconds) for seconds in rounds]

    @contextmanager
    def _rows(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        """Fills `slots`; yields the slots' positions, to be set. All zero afterwards."""
        num_rows = len(slots)
        rows = slice(1, 1 + num_rows)
        positions, tables = self._state.positions[rows], self._state.block_tables[:, rows]
        assert len(positions) == num_rows, "more rows than slots"
        numbers = torch.arange(num_rows * self._row_pages, device=slots.device)
        slots.copy_(torch.arange(1, 1 + num_rows, device=slots.device))
        pages = 1 + numbers % self._num_pages
        tables[..., : self._row_pages] = pages.view(num_rows, self._row_pages)
        tables[..., self._row_pages] = PADDING_PAGE
        try:
            yield positions
        finally:
            for tensor in (positions, tables, slots):
                tensor.zero_()
