"""Host arrays to device tensors, one copy per step however many arrays there are.

On CUDA the arrays of a step are packed into one pinned buffer and copied once. The buffers rotate,
and one is written again only after the event that says its copy was read: a step launched ahead
must not overwrite what the step before has not read yet. On the CPU a tensor owns its array.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT_BYTES = 16
NUM_BUFFERS = 3  # one being read, one launched ahead, one being written


class Staging:
    def __init__(self, device: torch.device, capacity_bytes: int = 1 << 20) -> None:
        self._device = device
        self._buffers: list[_PinnedBuffer] = []
        if device.type == "cuda":
            self._buffers = [_PinnedBuffer(capacity_bytes, device) for _ in range(NUM_BUFFERS)]
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

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._device = device
        self._read = torch.cuda.Event()
        self._allocate(capacity_bytes)

    def _allocate(self, capacity_bytes: int) -> None:
        self._host = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True)
        self._device_bytes = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        self._read.synchronize()  # returns at once: two steps have passed since this buffer's copy
        offsets, total = [], 0
        for array in arrays.values():
            offsets.append(total)
            total += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if total > self._host.numel():
            self._allocate(2 * total)
        packed = self._host.numpy()
        for offset, array in zip(offsets, arrays.values(), strict=True):
            packed[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._device_bytes[:total].copy_(self._host[:total], non_blocking=True)
        self._read.record()
        return {
            name: self._device_bytes[offset : offset + array.nbytes]
            .view(_TORCH_DTYPES[array.dtype])
            .view(array.shape)
            for offset, (name, array) in zip(offsets, arrays.items(), strict=True)
        }


_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
