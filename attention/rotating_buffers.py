"""Host buffers that are used in rotation, because the device reads them later.

A step launched ahead must not overwrite what the step before has not read yet. So a buffer has an
event for the copies out of it, and is written again only after that. With more buffers than steps
in flight nobody waits: the step that had this one is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class RotatingBuffers(Generic[T]):
    """`with buffers as buffer:` write to the next one, and enqueue all that will read it on the
    current stream. A CPU has read it by then.

    Events are `torch.Event`s: `torch.cuda.Event` looks the current stream up in Python, which takes
    five times as long as to record it.
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
