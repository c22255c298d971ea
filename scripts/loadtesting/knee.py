"""The highest request rate at which the server still meets its objectives.

Doubling until it fails, then bisection between the last rate that met and the first that did not.
Each probe is a run of its own seed and lasts PROBE_S at its rate, so a faster probe sends more.
A run that the client spoiled is tried once more; if it is late again, the rate counts as failed;
if that rate ends up as the first failing one, the result is invalid: the knee is the client's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from loadtesting.experiments import RunOnce
from loadtesting.record import LoadTestError
from loadtesting.run import Run
from loadtesting.settings import Settings

NEEDED_SHARE = 0.99  # of requests that meet all objectives
MAX_PROBES = 16
MIN_REQUESTS = 30  # of a probe, else one slow request decides


class Knee(NamedTuple):
    """None: no probe met the objectives, or none failed them."""

    met: float | None
    failed: float | None


def search(
    start: float, meets: Callable[[float], bool], tolerance: float, least: float = 0.0
) -> Knee:
    """`met` and `failed` end within a factor 1 + tolerance, unless probes run out.

    Rates below `least` are not tried.
    """
    met = failed = None
    rate = start
    for _ in range(MAX_PROBES):
        if meets(rate):
            met = rate
        else:
            failed = rate
        if met is None:
            rate /= 2
            if rate < least:
                break
        elif failed is None:
            rate *= 2
        elif failed <= met * (1 + tolerance):
            break
        else:
            rate = (met * failed) ** 0.5
    return Knee(met, failed)


def find_knee(
    settings: Settings, probe_s: float, tolerance: float, run_once: RunOnce
) -> tuple[Knee, list[Run]]:
    fixed = settings.closed_loop or settings.arrival in ("ramp", "replay")
    if settings.slo is None or fixed or math.isinf(settings.request_rate):
        raise LoadTestError("a knee search needs --slo and --request-rate; no ramp, no replay")
    runs: list[Run] = []

    def meets(rate: float) -> bool:
        num = max(MIN_REQUESTS, round(rate * probe_s)) * settings.num_turns
        for _ in range(2):
            seed = settings.seed + len(runs)
            runs.append(run_once(replace(settings, request_rate=rate, num_prompts=num, seed=seed)))
            if runs[-1].report["valid"]:
                break
        report = runs[-1].report
        return bool(report["valid"] and report["goodput"]["share"] >= NEEDED_SHARE)

    return search(settings.request_rate, meets, tolerance), runs


def knee_report(knee: Knee, runs: Sequence[Run]) -> dict[str, Any]:
    reports = [run.report for run in runs]
    late = {r["conditions"]["request_rate"] for r in reports if not r["valid"]}
    late -= {r["conditions"]["request_rate"] for r in reports if r["valid"]}
    return {
        "valid": knee.failed not in late,
        "knee_requests_per_s": knee.met,
        "first_failing_requests_per_s": knee.failed,
        "slos_ms": reports[0]["goodput"]["slos_ms"],
        "needed_share": NEEDED_SHARE,
        "num_failed": sum(report["num_failed"] for report in reports),
        "probes": [
            {
                "request_rate": report["conditions"]["request_rate"],
                "valid": report["valid"],
                "share": report["goodput"]["share"],
                "requests_per_s": report["requests_per_s"],
                "output_tokens_per_s": report["output_tokens_per_s"],
                "ttft_p99_ms": (report["latency_ms"]["ttft_from_intended"] or {}).get("p99"),
                "tpot_p99_ms": (report["latency_ms"]["tpot"] or {}).get("p99"),
            }
            for report in sorted(reports, key=lambda r: r["conditions"]["request_rate"])
        ],
        "runs": reports,
    }
