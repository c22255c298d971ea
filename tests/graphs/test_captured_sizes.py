"""A step is padded to the least size that was captured and holds it."""

from __future__ import annotations

from asyncllm.graphs.captured_sizes import CapturedSizes


def test_the_least_that_holds_it() -> None:
    sizes = CapturedSizes()
    assert sizes.fitting(1) is None
    for size in (8, 2, 4):
        sizes.add(size)
    assert list(sizes) == [2, 4, 8]
    assert [sizes.fitting(number) for number in (0, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, None]
