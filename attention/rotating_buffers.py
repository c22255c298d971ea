"""Host buffers used in rotation, because the device reads them later.

A step launched ahead must not overwrite inputs that the step before has not read yet. So each
buffer has an event after its copies, and is written again only after that event. With more buffers
than steps in flight there is no waiting, as the step that last used a buffer is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class RotatingBuffers(Generic[T]):
    """In `with buffers as buffer:`, write the buffer and enqueue all work that reads it, on the
    current stream. On a CPU that work is done at once.

    It uses `torch.Event`, as `torch.cuda.Event` looks up the current stream in Python, which takes
    five times as long as recording.
    """

    def __init__(self, buffers: Sequence[T], device: torch.device) -> None:
        self._buffers = buffers
        self._were_read = [torch.Event(device) for _ in buffers] if device.type == "cuda" else None
        self._current = 0

    def __enter__(self) -> T:
        self._current = (self._current + 1) % len(self._buffers)
        if self._were_read is not None:
            self._were_read[self._current].synchronize()
        return self._buffers[self._current]

    def __exit__(self, *_: object) -> None:
        if self._were_read is not None:
            self._were_read[self._current].record()
