"""Summarises several runs: mean and 95 % confidence interval over seeds, ratios of pairs.

Student's t on as many values as there are seeds. Below MIN_SEEDS there is no interval: of two
values it would be 12.7 times the standard error to either side, which says nothing. Ratios are
averaged as logarithms, so that B/A and A/B say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# 97.5 % points of Student's t for 1 to 30 degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
         2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
         2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
T_975_ABOVE = 2.0


MIN_SEEDS = 4


class Interval(NamedTuple):
    """low and high are None for too few values."""

    mean: float
    low: float | None
    high: float | None


def interval(values: Sequence[float]) -> Interval:
    mean, freedom = float(np.mean(values)), len(values) - 1
    if len(values) < MIN_SEEDS:
        return Interval(mean, None, None)
    t = T_975[freedom - 1] if freedom <= len(T_975) else T_975_ABOVE
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """b/a of pairs; None if a value is not positive."""
    if min(*a, *b) <= 0:
        return None
    logs = np.log(np.array(b) / np.array(a)).tolist()
    mean, low, high = interval(logs)
    back = [None if value is None else math.exp(value) for value in (low, high)]
    return Interval(math.exp(mean), *back)


SHOWN = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")


def flatten(report: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of one run that are worth comparing, by one name each."""
    for name in SHOWN:
        yield name, report[name]
    if "goodput" in report:
        yield "goodput.requests_per_s", report["goodput"]["requests_per_s"]
    latencies = {k: v for k, v in report["latency_ms"].items() if k != "sent_after_intended"}
    for name, spread in latencies.items():
        for statistic, value in (spread or {}).items():
            yield f"{name}.{statistic}_ms", value


def over_seeds(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """By figure; only those that every run has."""
    columns = collect(reports)
    return {name: interval(values)._asdict() for name, values in columns.items()}


def collect(reports: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    flat = [dict(flatten(report)) for report in reports]
    return {name: [f[name] for f in flat] for name in flat[0] if all(name in f for f in flat)}


def ratios(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """b/a by figure, a[i] and b[i] being a pair of one seed."""
    of_a, of_b = collect(a), collect(b)
    found = {name: ratio(of_a[name], of_b[name]) for name in of_a if name in of_b}
    return {name: r._asdict() for name, r in found.items() if r is not None}
