"""Copies a step's prefill rows to the device, in one copy from pinned memory.

The device reads that memory later, so a step launched ahead needs another `RowsUpload`: see
rotating_buffers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.attention.base import PrefillRows


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A step's rows, int32, all in pinned memory or all on the device."""

    pages: torch.Tensor  # of all cache groups, concatenated
    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    last_page_lens: torch.Tensor
    kv_lens: torch.Tensor


class RowsUpload:
    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self._allocate(1 << 12)

    def __call__(self, rows: PrefillRows) -> tuple[RowTensors, RowTensors]:
        """The rows in pinned memory, which the next call overwrites, and on the device."""
        last_page_lens = rows.kv_lens - (np.diff(rows.page_indptr) - 1) * self._block_size
        arrays = [rows.pages.reshape(-1), rows.query_indptr, rows.page_indptr, last_page_lens]
        arrays.append(rows.kv_lens)
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        if total > len(self._pinned):
            self._allocate(2 * total)
        np.concatenate(arrays, out=self._pinned.numpy()[:total], casting="same_kind")
        host, device = self._pinned[:total], self._on_device[:total]
        device.copy_(host, non_blocking=True)
        return RowTensors(*host.split(sizes)), RowTensors(*device.split(sizes))

    def _allocate(self, size: int) -> None:
        is_cuda = self._device.type == "cuda"
        self._pinned = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        self._on_device = torch.empty(size, dtype=torch.int32, device=self._device)
