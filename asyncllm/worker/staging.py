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
    def __init__(self, device: torch.device) -> None:
        self._buffers = RotatingBuffers([Twins(device) for _ in range(NUM_BUFFERS)], device)

    def upload(self, record: tuple[Any, ...]) -> Any:
        """The record, and the records in it, with tensors on the device in place of its arrays, of
        their shapes and dtypes, valid for this step.

        Copies on the current stream, without waiting for it.
        """
        arrays = list(_arrays_of(record))
        if not arrays:
            return record
        with self._buffers as buffer:
            return _with_tensors(record, iter(buffer.copy(arrays)))


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


class Twins:
    """A host buffer, pinned for CUDA, and one on the device: from arrays of int32 or float32 to the
    first, to views of the second, each aligned."""

    def __init__(self, device: torch.device, capacity_bytes: int = USUAL_BYTES) -> None:
        self._device = device
        self._allocate(capacity_bytes // WORD_BYTES)

    def _allocate(self, num_words: int) -> None:
        is_pinned = self._device.type == "cuda"
        self._host = torch.empty(num_words, dtype=torch.int32, pin_memory=is_pinned)
        self._twin = torch.empty(num_words, dtype=torch.int32, device=self._device)

    def copy(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """One copy of all, without waiting for it."""
        sizes = [size for array in arrays for size in (array.size, -array.size % ALIGNMENT_WORDS)]
        num_words = sum(sizes)
        if num_words > len(self._host):
            self._allocate(2 * num_words)
        words, end = self._host.numpy(), 0
        for array, size, gap in zip(arrays, sizes[::2], sizes[1::2], strict=True):
            assert array.dtype in TYPES, "an array of a type that no step has"
            words[end : end + size] = array.reshape(-1).view(np.int32)
            end += size + gap
        device = self._twin[:num_words]
        device.copy_(self._host[:num_words], non_blocking=True)
        views = zip(arrays, device.split(sizes)[::2], strict=True)
        return [view.view(TYPES[array.dtype]).view(array.shape) for array, view in views]


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
