"""Where a step's sampled tokens land on the host.

On CUDA a pinned buffer per step in flight, kept for the next ones: pinned memory from torch's
allocator costs an event per tensor. A buffer is free again once it was read, so that of a step
that failed is simply never reused. On the CPU the tokens are where they should be.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class ResultBuffers:
    """Buffers of `capacity` int32 tokens: the most rows that a step samples."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._pinned = device.type == "cuda"
        self._free: list[_Buffer] = []

    def fetch(self, tokens: torch.Tensor, num_rows: int) -> Callable[[], list[int]]:
        """Enqueue the copy of `tokens`, int32; call the result once, after the step's end. What is
        behind the first `num_rows` is padding."""
        if not self._pinned:
            return tokens[:num_rows].tolist
        buffer = self._free.pop() if self._free else _Buffer(self._allocate())
        host = buffer.first(len(tokens))
        host.copy_(tokens, non_blocking=True)

        def read() -> list[int]:
            token_ids: list[int] = host.tolist()
            self._free.append(buffer)
            return token_ids[:num_rows]

        return read

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._capacity, dtype=torch.int32, pin_memory=True)


class _Buffer:
    """And its first tokens, views that are made once: captured steps have few numbers of them."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._first: dict[int, torch.Tensor] = {}

    def first(self, number: int) -> torch.Tensor:
        if number not in self._first:
            self._first[number] = self._whole[:number]
        return self._first[number]
