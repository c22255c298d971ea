"""Captured graphs of one kind of work, by size: capture, which size fits, replay.

A size has a `Recorded` graph, or the pieces of a step that attention breaks. A step is padded to
the least size that holds it.

    captured 1 2 4 8     a step of 3 rows: fitting(3) = 4, and the fourth row is padding
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SizedGraphs(Generic[T]):
    """Sizes are captured in any order, each once; largest first saves memory."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # ascending
        self._captured: dict[int, T] = {}

    def add(self, size: int, captured: T) -> None:
        self._captured[size] = captured
        insort(self._sizes, size)

    def fitting(self, number: int) -> int | None:
        """The least captured size that is not below `number`; None: none is as large."""
        place = bisect_left(self._sizes, number)
        return self._sizes[place] if place < len(self._sizes) else None

    def __getitem__(self, size: int) -> T:
        return self._captured[size]

    def __contains__(self, size: int) -> bool:
        return size in self._captured

    def __iter__(self) -> Iterator[int]:
        """The captured sizes, ascending."""
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)
