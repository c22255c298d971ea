"""Host arrays to device tensors, one copy per step however many arrays there are.

On CUDA the arrays of a step are packed into one pinned buffer, one of a few that rotate, and copied
once. On the CPU a tensor owns its array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.attention.rotating_buffers import RotatingBuffers
from asyncllm.worker.packed_step import arrays_of, with_tensors

ALIGNMENT_BYTES = 16
USUAL_BYTES = 1 << 20  # of a buffer; it grows where a step has more
NUM_BUFFERS = 3  # one being read, one launched ahead, one being written


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._buffers: RotatingBuffers[_PinnedBuffer] | None = None
        if device.type == "cuda":
            self._buffers = RotatingBuffers(
                [_PinnedBuffer(device) for _ in range(NUM_BUFFERS)], device
            )

    def upload(self, record: tuple[Any, ...]) -> Any:
        """The record, and the records in it, with tensors on the device in place of its arrays, of
        their shapes and dtypes, valid for this step.

        Copies on the current stream, without waiting for it.
        """
        arrays = list(arrays_of(record))
        if not arrays:
            return record
        if self._buffers is None:
            return with_tensors(record, iter([torch.from_numpy(a.copy()) for a in arrays]))
        with self._buffers as buffer:
            return with_tensors(record, iter(buffer.upload(arrays)))


class _PinnedBuffer:
    """A pinned host buffer and its device twin."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocate(USUAL_BYTES)

    def _allocate(self, capacity_bytes: int) -> None:
        self._twins = Twins(
            torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True),
            torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device),
        )

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        most = sum(array.nbytes + ALIGNMENT_BYTES for array in arrays)
        if most > len(self._twins.host):
            self._allocate(2 * most)
        return self._twins.copy(arrays)


class Twins:
    """Two uint8 buffers of one size, and the way from arrays to the first to views of the second.

    Arrays of one type lie side by side, each aligned, so that one call gives all their views.
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host, self._device = host, device
        self._host_views = {dtype: host.numpy().view(dtype) for dtype in _TORCH_DTYPES}
        self._device_views = {dtype: device.view(t) for dtype, t in _TORCH_DTYPES.items()}

    def copy(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """One copy of all, without waiting for it; there must be room."""
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
        self._device[:end_bytes].copy_(self.host[:end_bytes], non_blocking=True)
        return [tensors[i] for i in range(len(arrays))]


_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
