"""Host arrays to device tensors, one copy per step however many arrays there are; tokens back.

On CUDA the arrays of a step are packed into one pinned buffer, one of a few that rotate, and copied
once. On the CPU a tensor owns its array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.attention.rotating_buffers import RotatingBuffers

ALIGNMENT_BYTES = 16
USUAL_BYTES = 1 << 20  # of a buffer; it grows where a step has more
NUM_BUFFERS = 3  # one being read, one launched ahead, one being written


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._buffers: RotatingBuffers[Twins] | None = None
        if device.type == "cuda":
            self._buffers = RotatingBuffers([Twins(device) for _ in range(NUM_BUFFERS)], device)

    def upload(self, record: tuple[Any, ...]) -> Any:
        """The record, and the records in it, with tensors on the device in place of its arrays, of
        their shapes and dtypes, valid for this step.

        Copies on the current stream, without waiting for it.
        """
        arrays = list(_arrays_of(record))
        if not arrays:
            return record
        if self._buffers is None:
            return _with_tensors(record, iter([torch.from_numpy(a.copy()) for a in arrays]))
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
    """A host buffer, pinned for CUDA, and one on the device: from arrays to the first, to views of
    the second. Arrays of one type lie side by side, each aligned: one call gives all their views.
    """

    def __init__(self, device: torch.device, capacity_bytes: int = USUAL_BYTES) -> None:
        self._device = device
        self._allocate(capacity_bytes)

    def _allocate(self, num_bytes: int) -> None:
        is_pinned = self._device.type == "cuda"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._twin = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._host_views = {dtype: self._host.numpy().view(dtype) for dtype in _TORCH_DTYPES}
        self._device_views = {dtype: self._twin.view(t) for dtype, t in _TORCH_DTYPES.items()}

    def copy(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """One copy of all, without waiting for it."""
        most_bytes = sum(array.nbytes + ALIGNMENT_BYTES for array in arrays)
        if most_bytes > len(self._host):
            self._allocate(2 * most_bytes)
        tensors: dict[int, torch.Tensor] = {}  # by the array's place
        end_bytes = 0
        for dtype, device in self._device_views.items():
            group = [(i, array) for i, array in enumerate(arrays) if array.dtype == dtype]
            start = end = end_bytes // dtype.itemsize
            sizes: list[int] = []  # of an array, of the gap behind it, and so on
            for _, array in group:
                gap = -array.size % (ALIGNMENT_BYTES // dtype.itemsize)
                self._host_views[dtype][end : end + array.size] = array.reshape(-1)
                sizes += array.size, gap
                end += array.size + gap
            end_bytes = end * dtype.itemsize
            views = device[start:end].split(sizes)[::2] if group else ()
            for (i, array), view in zip(group, views, strict=True):
                tensors[i] = view if array.ndim == 1 else view.view(array.shape)
        assert len(tensors) == len(arrays), "an array of a type that no step has"
        self._twin[:end_bytes].copy_(self._host[:end_bytes], non_blocking=True)
        return [tensors[i] for i in range(len(arrays))]


_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class ResultBuffers:
    """Pinned buffers of `capacity` int32 tokens: the most rows that a step samples.

    One per step in flight, kept for the next ones: pinned memory from torch's allocator costs an
    event per tensor. A buffer is free again once it was read, so that of a step that failed is
    simply never reused. On the CPU the tokens are where they should be.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._pinned = device.type == "cuda"
        self._free: list[_TokenBuffer] = []

    def fetch(self, tokens: torch.Tensor, num_rows: int) -> Callable[[], list[int]]:
        """Enqueue the copy of `tokens`, int32; call the result once, after the step's end. What is
        behind the first `num_rows` is padding."""
        if not self._pinned:
            return tokens[:num_rows].tolist
        buffer = self._free.pop() if self._free else _TokenBuffer(self._allocate())
        host = buffer.first(len(tokens))
        host.copy_(tokens, non_blocking=True)

        def read() -> list[int]:
            token_ids: list[int] = host.tolist()
            self._free.append(buffer)
            return token_ids[:num_rows]

        return read

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int32, pin_memory=True)


class _TokenBuffer:
    """A buffer and views of its first tokens, made once each: captured steps have few sizes."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._first: dict[int, torch.Tensor] = {}

    def first(self, number: int) -> torch.Tensor:
        if number not in self._first:
            self._first[number] = self._whole[:number]
        return self._first[number]
