"""A mixed step's arrays on the device, always at the same addresses, where graphs look for them.

On CUDA one copy brings them, from pinned buffers that rotate as those of staging.py do. Of the
arrays of rows what is beyond the step's is 0: the padding slot. Of the arrays of tokens, what the
decodes have is for `FillDecodes` to fill, and beyond the step's tokens `write_slots` is 0, the
padding page; the rest is stale, which is harmless.
"""

from __future__ import annotations

import torch

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
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self._next = 0
        rows, tokens, self.write_slots = self._split(self._device)
        self._rows_on_device = rows
        self.decode_slots, self.sample_tokens, self.sample_slots, self.sample_positions = rows
        self.positions, self.prompt_lens, self.token_ids = tokens

    def put(self, step: StepTokens, num_tokens: int | None) -> None:
        """num_tokens: of the graph that will read it; None: it reads no tokens."""
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer = self._buffers[self._next]
        buffer.wait()
        buffer.rows[:] = 0
        buffer.rows[0, : len(step.decode_slots)] = step.decode_slots
        buffer.rows[1:, : step.num_samples] = step.samples
        if num_tokens is None:
            buffer.send_rows(self._rows_on_device)
            return
        first, end = len(step.decode_slots), step.num_tokens
        buffer.tokens[:, first:end] = step.tokens
        buffer.write_slots[first:end] = step.write_slots
        buffer.write_slots[end:num_tokens] = 0
        buffer.send(self._device)

    def clear(self) -> None:
        """Nothing of the last step is there: no decodes, and all that is written goes to the
        padding page."""
        self._device.zero_()

    def _split(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows int32 [4, max_rows], of tokens int32 [3, max_tokens], and write_slots."""
        num_rows, num_tokens = self._max_rows, self._max_tokens
        sizes = (len(ROW_ARRAYS) * num_rows, len(TOKEN_ARRAYS) * num_tokens, 2 * num_tokens)
        rows, tokens, write_slots = memory.split(sizes)
        return rows.view(-1, num_rows), tokens.view(-1, num_tokens), write_slots.view(torch.int64)

    def _new_buffer(self) -> _Buffer:
        is_cuda = self._device.is_cuda
        host = torch.zeros(len(self._device), dtype=torch.int32, pin_memory=is_cuda)
        event = torch.cuda.Event() if is_cuda else None
        return _Buffer(host, *self._split(host), event)


class _Buffer:
    """It may be written again after the event that says it was read."""

    def __init__(
        self,
        host: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        write_slots: torch.Tensor,
        read: torch.cuda.Event | None,
    ) -> None:
        self._host, self._host_rows, self._read = host, rows, read
        self.rows, self.tokens = rows.numpy(), tokens.numpy()
        self.write_slots = write_slots.numpy()

    def wait(self) -> None:
        if self._read is not None:
            self._read.synchronize()  # at once: two steps have passed since

    def send(self, device: torch.Tensor) -> None:
        self._copy(self._host, device)

    def send_rows(self, device: torch.Tensor) -> None:
        self._copy(self._host_rows, device)

    def _copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        device.copy_(host, non_blocking=True)
        if self._read is not None:
            self._read.record()
