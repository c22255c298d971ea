"""A histogram that takes many values at once, and gives Prometheus buckets or quantiles.

The bins are finer than the published buckets: the buckets' bounds are among the bins' edges, so one
binning serves both. Bin i holds edges[i-1] < value <= edges[i], as Prometheus' `le` wants it; the
last bin is open. A quantile is right to the width of a bin, 5 % for `latency_edges`. Values are
kept as they come, and binned when somebody looks or when there are many: to bin one costs a
microsecond, to bin MOST_UNBINNED of them 30.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Counts = np.ndarray  # int64 [bins]

MOST_UNBINNED = 1024


class Histogram:
    """`bounds`: the published buckets, ascending. `edges`: more edges for finer quantiles."""

    def __init__(self, bounds: Sequence[float], edges: Sequence[float] = ()) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._edges = np.unique(np.array([*self.bounds, *edges]))
        self._edge_list: list[float] = self._edges.tolist()
        self._last_bins = np.searchsorted(self._edges, self.bounds)  # of each bucket
        self._counts: Counts = np.zeros(len(self._edges) + 1, np.int64)
        self._total = 0.0
        self._unbinned: list[float] = []

    def observe(self, *values: float) -> None:
        self._unbinned += values
        if len(self._unbinned) >= MOST_UNBINNED:
            self._bin()

    def _bin(self) -> None:
        values = np.array(self._unbinned, np.float64)
        self._unbinned.clear()
        bins = np.searchsorted(self._edges, values)
        self._counts += np.bincount(bins, minlength=len(self._counts))
        self._total += float(values.sum())

    @property
    def counts(self) -> Counts:
        """The count of each bin; not to be changed."""
        if self._unbinned:
            self._bin()
        return self._counts

    @property
    def total(self) -> float:
        """The sum of all values."""
        if self._unbinned:
            self._bin()
        return self._total

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


def latency_edges() -> list[float]:
    """Seconds, from 20 us to ten minutes, each edge 5 % above the one before."""
    first, last = 20e-6, 600.0
    return np.geomspace(first, last, 1 + int(np.log(last / first) / np.log(1.05))).tolist()
