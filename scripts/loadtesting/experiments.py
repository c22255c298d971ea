"""Several runs: over seeds, and two servers in turn.

Each run has a seed of its own, else the second would find its prompts in the server's prefix cache.
Two servers take turns, and who goes first alternates (A B, B A, ...), so that a machine that
slowly warms up or clocks down is nobody's advantage. Both get the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from loadtesting.interval import over_seeds, ratios
from loadtesting.run import Run
from loadtesting.settings import Settings

RunOnce = Callable[[Settings], Run]


def repeat(settings: Settings, num: int, run_once: RunOnce) -> list[Run]:
    return [run_once(replace(settings, seed=settings.seed + i)) for i in range(num)]


def repeat_report(runs: Sequence[Run]) -> dict[str, Any]:
    """One run's report as it is; of several, the intervals and each report."""
    reports = [run.report for run in runs]
    if len(reports) == 1:
        return reports[0]
    return {"valid": all(r["valid"] for r in reports), "num_seeds": len(reports),
            "num_failed": sum(r["num_failed"] for r in reports),
            "over_seeds": over_seeds(reports), "runs": reports}  # fmt: skip


def interleave(
    a: Settings, b: Settings, num: int, run_once: RunOnce
) -> tuple[list[Run], list[Run]]:
    runs: tuple[list[Run], list[Run]] = ([], [])
    for i in range(num):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            settings = (a, b)[side]
            runs[side].append(run_once(replace(settings, seed=settings.seed + i)))
    return runs


def ab_report(a: Sequence[Run], b: Sequence[Run]) -> dict[str, Any]:
    reports = [run.report for run in a], [run.report for run in b]
    both = [*reports[0], *reports[1]]
    return {
        "valid": all(r["valid"] for r in both),
        "num_seeds": len(a),
        "num_failed": sum(r["num_failed"] for r in both),
        "a": {"base_url": a[0].name, "over_seeds": over_seeds(reports[0])},
        "b": {"base_url": b[0].name, "over_seeds": over_seeds(reports[1])},
        "b_over_a": ratios(*reports),
        "runs": both,
    }
