"""Which graphs are captured before the engine is ready, and which when it has nothing to do.

A capture costs the host 10 to 20 ms and waits for the device. So the sizes that most batches need
come first, spread by doubling: any batch then finds a graph of at most twice its size. The rest
follow one at a time while no request waits or runs. It knows neither kernels nor streams.

    sizes 1 2 4 8 12 16 24 32 40 48 56 64     first: 64 32 16 8 4 2 1     later: 56 48 40 24 12
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

Capture = Callable[[], None]


class PendingCaptures:
    """Captured in their order, by calls of `capture_one`."""

    def __init__(self, captures: Iterable[Capture] = ()) -> None:
        self._later = deque(captures)

    def extend(self, captures: Iterable[Capture]) -> None:
        self._later.extend(captures)

    def __len__(self) -> int:
        return len(self._later)

    def capture_one(self) -> None:
        """The next one; it counts as done even where it raises: it is not tried for ever."""
        self._later.popleft()()

    def clear(self) -> None:
        self._later.clear()


def first_sizes(sizes: Sequence[int]) -> list[int]:
    """The largest of `sizes`, in any order, and down from it the largest of at most half. Largest
    first, because graphs share memory and the first one sets its size."""
    chosen: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not chosen or size * 2 <= chosen[-1] or size == min(sizes):
            chosen.append(size)
    return chosen


def later_sizes(sizes: Sequence[int]) -> list[int]:
    """The others, largest first."""
    return sorted(set(sizes) - set(first_sizes(sizes)), reverse=True)
