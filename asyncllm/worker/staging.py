"""Host arrays to device tensors, one copy per step however many arrays there are; tokens back.

The arrays of a step are packed into one buffer, pinned for CUDA, one of a few that rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.attention.rotating_buffers import RotatingBuffers

WORD_BYTES = 4
ALIGNMENT_WORDS = 4
TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
USUAL_BYTES = 1 << 20  # of a buffer; it grows where a step has more
NUM_BUFFERS = 3  # one being read, one launched ahead, one being written


class Staging:
    """Rotating pairs of a host buffer, pinned for CUDA, and one on the device."""

    def __init__(
        self, device: torch.device, capacity_bytes: int = USUAL_BYTES, num_ahead: int = 1
    ) -> None:
        """num_ahead: steps that are launched before one is done."""
        self._device = device
        pairs = [self._pair(capacity_bytes // WORD_BYTES) for _ in range(NUM_BUFFERS * num_ahead)]
        self._buffers = RotatingBuffers(pairs, device)

    def upload(self, record: tuple[Any, ...]) -> Any:
        """The record, and the records in it, with tensors on the device in place of its arrays of
        int32 or float32, of their shapes and dtypes, aligned, valid for this step.

        Copies on the current stream, without waiting for it.
        """
        arrays = list(_arrays_of(record))
        if not arrays:
            return record
        with self._buffers as pair:
            return _with_tensors(record, iter(self._copy(arrays, pair)))

    def _pair(self, num_words: int) -> list[torch.Tensor]:
        is_pinned = self._device.type == "cuda"
        host = torch.empty(num_words, dtype=torch.int32, pin_memory=is_pinned)
        return [host, torch.empty(num_words, dtype=torch.int32, device=self._device)]

    def _copy(self, arrays: Sequence[np.ndarray], pair: list[torch.Tensor]) -> list[torch.Tensor]:
        """One copy of all. The pair grows where they have no room."""
        sizes = [size for array in arrays for size in (array.size, -array.size % ALIGNMENT_WORDS)]
        num_words = sum(sizes)
        if num_words > len(pair[0]):
            pair[:] = self._pair(2 * num_words)
        words, end = pair[0].numpy(), 0
        for array, size, gap in zip(arrays, sizes[::2], sizes[1::2], strict=True):
            assert array.dtype in TYPES, "an array of a type that no step has"
            words[end : end + size] = array.reshape(-1).view(np.int32)
            end += size + gap
        device = pair[1][:num_words]
        device.copy_(pair[0][:num_words], non_blocking=True)
        views = zip(arrays, device.split(sizes)[::2], strict=True)
        return [view.view(TYPES[array.dtype]).view(array.shape) for array, view in views]


def _arrays_of(record: tuple[Any, ...]) -> Iterator[np.ndarray]:
    """The arrays of a record and of the records in it, in order."""
    for field in record:
        if isinstance(field, tuple):
            yield from _arrays_of(field)
        elif field is not None:
            yield field


def _with_tensors(record: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The record with the next tensors in place of its arrays."""
    if record is None:
        return None
    if not isinstance(record, tuple):
        return next(tensors)
    fields = [_with_tensors(field, tensors) for field in record]
    return type(record)(*fields) if hasattr(record, "_fields") else tuple(fields)


class ResultBuffers:
    """Pinned buffers of `capacity` int32 tokens: the most rows that a step samples.

    One per step in flight, kept for the next ones: pinned memory from torch's allocator costs an
    event per tensor. A buffer is free again once it was read, so that of a step that failed is
    simply never reused. On the CPU the tokens are where they should be.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._pinned = device.type == "cuda"
        self._free: list[torch.Tensor] = []

    def fetch(self, tokens: torch.Tensor, num_rows: int) -> Callable[[], list[int]]:
        """Enqueue the copy of `tokens`, int32; call the result once, after the step's end. What is
        behind the first `num_rows` is padding."""
        if not self._pinned:
            return tokens[:num_rows].tolist
        buffer = self._free.pop() if self._free else self._allocate()
        host = buffer[: len(tokens)]
        host.copy_(tokens, non_blocking=True)

        def read() -> list[int]:
            token_ids: list[int] = host.tolist()
            self._free.append(buffer)
            return token_ids[:num_rows]

        return read

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int32, pin_memory=True)
