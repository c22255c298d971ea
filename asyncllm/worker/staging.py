"""Host arrays to device tensors, one copy per step however many arrays there are.

On CUDA the arrays of a step are packed into one pinned buffer and copied once. The buffers rotate,
and one is written again only after the event that says its copy was read: a step launched ahead
must not overwrite what the step before has not read yet. On the CPU a tensor owns its array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

ALIGNMENT_BYTES = 16
USUAL_BYTES = 1 << 20  # of a buffer; it grows where a step has more
NUM_BUFFERS = 3  # one being read, one launched ahead, one being written


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_PinnedBuffer] = []
        if device.type == "cuda":
            self._buffers = [_PinnedBuffer(device) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors on the device with the arrays' names, shapes and dtypes, valid for this step.

        Copies on the current stream, without waiting for it.
        """
        if not arrays:  # a step of the same decodes on the same pages
            return {}
        if self._device.type == "cpu":
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        self._next = (self._next + 1) % NUM_BUFFERS
        return self._buffers[self._next].upload(arrays)


class _PinnedBuffer:
    """A pinned host buffer, its device twin, and the event after which it may be written again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read = torch.cuda.Event()
        self._allocate(USUAL_BYTES)

    def _allocate(self, capacity_bytes: int) -> None:
        self._twins = Twins(
            torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True),
            torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device),
        )

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        self._read.synchronize()  # returns at once: two steps have passed since this buffer's copy
        most = sum(array.nbytes + ALIGNMENT_BYTES for array in arrays.values())
        if most > len(self._twins.host):
            self._allocate(2 * most)
        tensors = self._twins.copy(arrays)
        self._read.record()
        return tensors


class Twins:
    """Two uint8 buffers of one size, and the way from arrays to the first to views of the second.

    Arrays of one type lie side by side, each aligned, so that one call gives all their views.
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host, self._device = host, device
        self._host_views = {dtype: host.numpy().view(dtype) for dtype in _TORCH_DTYPES}
        self._device_views = {dtype: device.view(t) for dtype, t in _TORCH_DTYPES.items()}

    def copy(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """One copy of all, without waiting for it; there must be room."""
        tensors: dict[str, torch.Tensor] = {}
        end_bytes = 0
        for dtype, device in self._device_views.items():
            group = {name: array for name, array in arrays.items() if array.dtype == dtype}
            start = end = end_bytes // dtype.itemsize
            sizes: list[int] = []  # of an array, of the gap behind it, and so on
            for array in group.values():
                gap = -array.size % (ALIGNMENT_BYTES // dtype.itemsize)
                self._host_views[dtype][end : end + array.size] = array.reshape(-1)
                sizes += array.size, gap
                end += array.size + gap
            end_bytes = end * dtype.itemsize
            views = device[start:end].split(sizes)[::2] if group else ()
            for (name, array), view in zip(group.items(), views, strict=True):
                tensors[name] = view if array.ndim == 1 else view.view(array.shape)
        assert len(tensors) == len(arrays), "an array of a type that no step has"
        self._device[:end_bytes].copy_(self.host[:end_bytes], non_blocking=True)
        return tensors


_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
