"""A mixed step's arrays on the device, always at the same addresses, where graphs look for them.

One copy brings them, on CUDA from pinned buffers that take turns. Of the arrays of rows what is
beyond the step's is 0: the padding slot. Of the arrays of tokens, what the decodes have is for
`FillDecodes` to fill, and beyond the step's tokens `write_slots` is 0, the padding page; the rest
is stale, which is harmless.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from asyncllm.attention.turns import Turns
from asyncllm.worker.staging import NUM_BUFFERS
from asyncllm.worker.step_inputs import StepTokens

ROW_ARRAYS = ("decode_slots", "sample_tokens", "sample_slots", "sample_positions")
TOKEN_ARRAYS = ("positions", "prompt_lens", "token_ids")  # and write_slots, of 64 bits


class Inbox:
    """For steps of at most `max_rows` rows, and of `max_tokens` tokens where they are brought."""

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        max_tokens += max_tokens % 2  # 64-bit numbers follow
        self._max_tokens, self._max_rows = max_tokens, max_rows
        num_words = len(ROW_ARRAYS) * max_rows + (len(TOKEN_ARRAYS) + 2) * max_tokens
        self._device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._turns = Turns([self._new_buffer() for _ in range(NUM_BUFFERS)], device)
        rows, tokens, self.write_slots = self._split(self._device)
        self._rows_on_device = rows
        self.decode_slots, self.sample_tokens, self.sample_slots, self.sample_positions = rows
        self.positions, self.prompt_lens, self.token_ids = tokens

    def put(self, step: StepTokens, num_tokens: int | None) -> None:
        """num_tokens: of the graph that will read it; None: it reads no tokens."""
        with self._turns as buffer:
            buffer.rows[:] = 0
            buffer.rows[0, : len(step.decode_slots)] = step.decode_slots
            buffer.rows[1:, : step.num_samples] = step.samples
            if num_tokens is None:
                self._rows_on_device.copy_(buffer.rows_tensor, non_blocking=True)
                return
            first, end = len(step.decode_slots), step.num_tokens
            buffer.tokens[:, first:end] = step.tokens
            buffer.write_slots[first:end] = step.write_slots
            buffer.write_slots[end:num_tokens] = 0
            self._device.copy_(buffer.tensor, non_blocking=True)

    def clear(self) -> None:
        """Nothing of the last step is there: no decodes, and all that is written goes to the
        padding page."""
        self._device.zero_()

    def _split(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows int32 [4, max_rows], of tokens int32 [3, max_tokens], and write_slots."""
        num_rows, num_tokens = self._max_rows, self._max_tokens
        sizes = (len(ROW_ARRAYS) * num_rows, len(TOKEN_ARRAYS) * num_tokens, 2 * num_tokens)
        rows, tokens, write_slots = memory.split(sizes)
        rows, tokens = rows.view(-1, num_rows), tokens.view(len(TOKEN_ARRAYS), num_tokens)
        return rows, tokens, write_slots.view(torch.int64)

    def _new_buffer(self) -> _Buffer:
        tensor = torch.zeros(len(self._device), dtype=torch.int32, pin_memory=self._device.is_cuda)
        rows, tokens, write_slots = self._split(tensor)
        return _Buffer(tensor, rows, rows.numpy(), tokens.numpy(), write_slots.numpy())


class _Buffer(NamedTuple):
    """The host's, whole and in its parts."""

    tensor: torch.Tensor
    rows_tensor: torch.Tensor
    rows: np.ndarray
    tokens: np.ndarray
    write_slots: np.ndarray
