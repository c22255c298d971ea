"""Captured graphs of one kind of work, by size.

A size has a `Recorded` graph, or the pieces of a step that is not captured whole. A step is padded
to the smallest captured size that holds it.

    captured 1 2 4 8     a step of 3 rows: fitting(3) = 4, and the fourth row is padding

A capture costs the host 10 to 20 ms and waits for the device. So the start only captures sizes that
double: any batch then has a graph of at most twice its size. The other sizes are captured one at a
time while no request waits or runs.

    sizes 1 2 4 8 12 16 24 32 40 48 56 64     first: 64 32 16 8 4 2 1     later: 56 48 40 24 12
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class SizedGraphs(Generic[T]):
    """Sizes may be captured in any order, each once; largest first saves memory."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # ascending
        self._captured: dict[int, T] = {}

    def add(self, size: int, captured: T) -> None:
        self._captured[size] = captured
        insort(self._sizes, size)

    def fitting(self, number: int) -> int | None:
        """The smallest captured size of at least `number`; None if there is none."""
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


def first_sizes(sizes: Sequence[int]) -> list[int]:
    """The largest size, then repeatedly the largest of at most half, and the smallest. They are
    descending, because the first capture sets the size of the shared memory."""
    chosen: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not chosen or size * 2 <= chosen[-1] or size == min(sizes):
            chosen.append(size)
    return chosen


def later_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes that are not in `first_sizes`, largest first."""
    return sorted(set(sizes) - set(first_sizes(sizes)), reverse=True)
