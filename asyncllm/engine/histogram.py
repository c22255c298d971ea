"""A histogram that takes a step's values at once, and gives Prometheus buckets or quantiles.

The bins are finer than the published buckets: the buckets' bounds are among the bins' edges, so one
binning serves both. Bin i holds edges[i-1] < value <= edges[i], as Prometheus' `le` wants it; the
last bin is open. A quantile is right to the width of a bin, 5 % for `latency_edges`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

Counts = np.ndarray  # int64 [bins]

FEW = 12  # below, a loop of bisections is faster than numpy's fixed cost


class Histogram:
    """`bounds`: the published buckets, ascending. `edges`: more edges for finer quantiles."""

    def __init__(self, bounds: Sequence[float], edges: Sequence[float] = ()) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._edges = np.unique(np.array([*self.bounds, *edges]))
        self._edge_list: list[float] = self._edges.tolist()
        self._last_bins = np.searchsorted(self._edges, self.bounds)  # of each bucket
        self.counts: Counts = np.zeros(len(self._edges) + 1, np.int64)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._edge_list, value)] += 1
        self.total += value

    def observe_many(self, values: Sequence[float] | np.ndarray) -> None:
        """One binning for all of a step's values."""
        if len(values) < FEW:
            for value in values:
                self.observe(value)
            return
        array = np.asarray(values, np.float64)
        bins = np.searchsorted(self._edges, array)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.total += float(array.sum())

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def cumulative(self) -> list[int]:
        """Values up to each of `bounds`, and at last all of them."""
        sums = self.counts.cumsum()
        return [*sums[self._last_bins].tolist(), int(sums[-1])]

    def quantiles(self, shares: Sequence[float], counts: Counts | None = None) -> list[float]:
        """The upper edge of the bin that holds each share of `counts` (default: of all).

        `counts` may be the difference of two copies of `self.counts`. Raises `ValueError` if empty.
        """
        counts = self.counts if counts is None else counts
        sums = counts.cumsum()
        if not sums[-1]:
            raise ValueError("quantiles of nothing")
        bins = np.searchsorted(sums, np.asarray(shares) * sums[-1])
        return [self._edge_list[min(b, len(self._edge_list) - 1)] for b in bins.tolist()]


def latency_edges(first: float = 20e-6, last: float = 600.0, growth: float = 1.05) -> list[float]:
    """Seconds, each edge 5 % above the one before."""
    return np.geomspace(first, last, 1 + int(np.log(last / first) / np.log(growth))).tolist()
