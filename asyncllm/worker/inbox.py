"""A mixed step's arrays on the device, always at the same addresses, where graphs look for them.

On CUDA one copy brings them, from pinned buffers that rotate as those of staging.py do. Of the
arrays of rows what is beyond the step's is 0: the padding slot. Of the arrays of tokens, what the
decodes have is for `FillDecodes` to fill, and beyond the step's tokens `write_slots` is 0, the
padding page; the rest is stale, which is harmless.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.worker.staging import NUM_BUFFERS
from asyncllm.worker.step_inputs import StepTokens

ROW_ARRAYS = ("decode_slots", "sample_tokens", "sample_slots", "sample_positions")
TOKEN_ARRAYS = ("token_ids", "positions", "prompt_lens")  # and write_slots, of 64 bits


class Inbox:
    """For steps of at most `max_rows` rows, and of `max_tokens` tokens where they are brought."""

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        max_tokens += max_tokens % 2  # 64-bit numbers follow
        self._sizes = [max_rows] * len(ROW_ARRAYS) + [max_tokens] * len(TOKEN_ARRAYS)
        self._row_bytes = 4 * max_rows * len(ROW_ARRAYS)
        self._device = torch.zeros(
            4 * sum(self._sizes) + 8 * max_tokens, dtype=torch.uint8, device=device
        )
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self._next = 0
        arrays = self._split(self._device)
        self.decode_slots = arrays["decode_slots"]
        self.sample_tokens = arrays["sample_tokens"]
        self.sample_slots = arrays["sample_slots"]
        self.sample_positions = arrays["sample_positions"]
        self.token_ids = arrays["token_ids"]
        self.positions = arrays["positions"]
        self.prompt_lens = arrays["prompt_lens"]
        self.write_slots = arrays["write_slots"]

    def put(self, step: StepTokens, num_tokens: int | None) -> None:
        """num_tokens: of the graph that will read it; None: it reads no tokens."""
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer = self._buffers[self._next]
        buffer.wait()
        for name in ROW_ARRAYS:
            array, values = buffer.arrays[name], getattr(step, name)
            array[: len(values)] = values
            array[len(values) :] = 0
        if num_tokens is None:
            buffer.send(self._device[: self._row_bytes])
            return
        first, end = len(step.decode_slots), step.num_tokens
        for name in (*TOKEN_ARRAYS, "write_slots"):
            buffer.arrays[name][first:end] = getattr(step, name)
        buffer.arrays["write_slots"][end:num_tokens] = 0
        buffer.send(self._device)

    def clear(self) -> None:
        """Nothing of the last step is there: no decodes, and all that is written goes to the
        padding page."""
        self._device.zero_()

    def _split(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        end = 4 * sum(self._sizes)
        arrays = memory[:end].view(torch.int32).split(self._sizes)
        wide = memory[end:].view(torch.int64)
        return dict(zip((*ROW_ARRAYS, *TOKEN_ARRAYS, "write_slots"), (*arrays, wide), strict=True))

    def _new_buffer(self) -> _Buffer:
        is_cuda = self._device.is_cuda
        host = torch.zeros(len(self._device), dtype=torch.uint8, pin_memory=is_cuda)
        arrays = {name: tensor.numpy() for name, tensor in self._split(host).items()}
        return _Buffer(host, arrays, torch.cuda.Event() if is_cuda else None)


class _Buffer:
    """`arrays`: its views. It may be written again after the event that says it was read."""

    def __init__(
        self, host: torch.Tensor, arrays: dict[str, np.ndarray], read: torch.cuda.Event | None
    ) -> None:
        self._host, self._read = host, read
        self.arrays = arrays

    def wait(self) -> None:
        if self._read is not None:
            self._read.synchronize()  # at once: two steps have passed since

    def send(self, device: torch.Tensor) -> None:
        """The beginning of the buffer, as much as `device` is long."""
        device.copy_(self._host[: len(device)], non_blocking=True)
        if self._read is not None:
            self._read.record()
