"""Binning many at once agrees with counting each, and with numpy's own quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from asyncllm.engine.recorder import MOST_UNBINNED, Histogram, latency_edges

BOUNDS = (0.001, 0.005, 0.01, 0.1)


def test_bounds_are_inclusive() -> None:
    histogram = Histogram(BOUNDS, latency_edges())
    for value in (0.001, 0.0011, 0.1, 0.2):
        histogram.observe(value)
    assert histogram.cumulative() == [1, 2, 2, 3, 4]
    assert histogram.counts.sum() == 4
    assert histogram.total == pytest.approx(0.3021)


@pytest.mark.parametrize("size", [0, 1, MOST_UNBINNED - 1, MOST_UNBINNED, 3 * MOST_UNBINNED + 1])
def test_many_at_once_are_as_one_by_one(size: int) -> None:
    values = np.random.default_rng(size).lognormal(-5, 2, size).tolist()
    values[:2] = [0.01, 5e-6][: len(values)]  # on a bound, and under every edge
    at_once, one_by_one = Histogram(BOUNDS, latency_edges()), Histogram(BOUNDS, latency_edges())
    at_once.observe(*values)
    for value in values:
        one_by_one.observe(value)
    assert np.array_equal(at_once.counts, one_by_one.counts)
    assert at_once.total == pytest.approx(one_by_one.total)
    assert at_once.cumulative() == [sum(v <= b for v in values) for b in (*BOUNDS, np.inf)]


def test_quantiles_are_right_to_a_bin() -> None:
    values = np.random.default_rng(7).lognormal(-5, 1, 10_000)
    histogram = Histogram(BOUNDS, latency_edges())
    histogram.observe(*values)
    shares = (0.5, 0.9, 0.99)
    assert histogram.quantiles(shares, histogram.counts) == pytest.approx(
        np.quantile(values, shares), rel=0.06
    )


def test_quantiles_of_a_difference() -> None:
    histogram = Histogram(BOUNDS, latency_edges())
    histogram.observe(*[0.002] * 100)
    before = histogram.counts.copy()
    histogram.observe(*[0.05] * 20)
    assert histogram.quantiles((0.5,), histogram.counts - before) == pytest.approx([0.05], rel=0.06)
    with pytest.raises(ValueError, match="nothing"):
        histogram.quantiles((0.5,), before - before)


def test_beyond_the_last_edge() -> None:
    histogram = Histogram((1, 2))
    histogram.observe(*[9.0] * 3)
    assert histogram.cumulative() == [0, 0, 3]
    assert histogram.quantiles((0.5,), histogram.counts) == [2.0]
