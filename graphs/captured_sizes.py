"""The sizes that are captured so far, and which of them a step is padded to."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class CapturedSizes:
    """Ascending, each once; captured in any order."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def add(self, size: int) -> None:
        insort(self._sizes, size)

    def fitting(self, number: int) -> int | None:
        """The least that is not below `number`; None: none is as large."""
        place = bisect_left(self._sizes, number)
        return self._sizes[place] if place < len(self._sizes) else None
