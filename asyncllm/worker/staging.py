"""Copies between host and device: a step's arrays in a single copy, and sampled tokens back.

The arrays of a step are packed into one of several rotating buffers, pinned for CUDA.
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
USUAL_BYTES = 1 << 20  # size of a buffer; it grows if a step needs more
NUM_BUFFERS = 3  # one being read, one launched ahead, one being written


class Staging:
    """Rotating pairs of a host buffer, pinned for CUDA, and a device buffer."""

    def __init__(
        self, device: torch.device, capacity_bytes: int = USUAL_BYTES, num_ahead: int = 1
    ) -> None:
        """num_ahead: steps that may be launched before one is finished."""
        self._device = device
        pairs = [self._pair(capacity_bytes // WORD_BYTES) for _ in range(NUM_BUFFERS * num_ahead)]
        self._buffers = RotatingBuffers(pairs, device)

    def upload(self, record: tuple[Any, ...]) -> Any:
        """The record, and records in it, with device tensors in place of its arrays.

        Arrays are int32 or float32. The tensors are aligned, and valid for this step. It copies on
        the current stream, without waiting for it.
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
        """Copy all arrays at once. The pair grows if they do not fit."""
        sizes = [size for array in arrays for size in (array.size, -array.size % ALIGNMENT_WORDS)]
        num_words = sum(sizes)
        if num_words > len(pair[0]):
            pair[:] = self._pair(2 * num_words)
        words, end = pair[0].numpy(), 0
        for array, size, gap in zip(arrays, sizes[::2], sizes[1::2], strict=True):
            assert array.dtype in TYPES, f"unexpected dtype {array.dtype}"
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
    """Pinned buffers of `capacity` int32 tokens, the most that a step samples.

    There is one per step in flight. They are reused, as pinned memory from torch's allocator costs
    an event per tensor. A buffer is free once it is read; that of a failed step is never reused. On
    the CPU no copy is needed.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._pinned = device.type == "cuda"
        self._free: list[torch.Tensor] = []

    def fetch(self, tokens: torch.Tensor, num_rows: int) -> Callable[[], list[int]]:
        """Enqueue a copy of `tokens`, int32, whose first `num_rows` are not padding. Call the
        result once, after the step's end, to read them."""
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
