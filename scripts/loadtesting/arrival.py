"""When requests are due: seconds after the start, ascending, from the seed.

Times are scaled so that the last request is due when the rate says: num requests take num / rate
seconds exactly, whatever the draw. What remains random is the order of short and long gaps.
A closed loop has no times: an answer makes the next request due.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from loadtesting.record import LoadTestError, reason
from loadtesting.settings import Settings


class TraceRow(NamedTuple):
    due_s: float
    input_len: int
    output_len: int


def arrival_times(settings: Settings, num: int, rng: np.random.Generator) -> np.ndarray | None:
    """[num] seconds after the start; None for a closed loop."""
    if settings.closed_loop:
        return None
    if settings.trace is not None:
        rows = read_trace(settings.trace)
        if len(rows) < num:
            raise LoadTestError(f"{settings.trace} has {len(rows)} requests, {num} are asked for")
        return np.array([row.due_s for row in rows[:num]])
    if math.isinf(settings.request_rate):
        return np.zeros(num)
    if settings.arrival == "ramp":
        assert settings.ramp_to_rate is not None
        return ramp_times(settings.request_rate, settings.ramp_to_rate, num, rng)
    shape = math.inf if settings.arrival == "constant" else settings.burstiness
    return gamma_times(settings.request_rate, 1.0 if settings.arrival == "poisson" else shape,
                       num, rng)  # fmt: skip


def gamma_times(rate: float, shape: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """Gamma gaps: shape 1 is Poisson, infinity is constant; gaps' deviation / mean = shape^-0.5."""
    gaps = np.ones(num) if math.isinf(shape) else rng.gamma(shape, size=num)
    times = np.cumsum(gaps)
    return times * (num / rate / times[-1])


def ramp_times(start: float, end: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """Poisson arrivals whose rate goes from start to end in a straight line.

    After t of T seconds, start t + (end - start) t^2 / 2T requests are due; with T = 2 num /
    (start + end) that is num at the end. Solved for t at num random points of unit rate.
    """
    due = gamma_times(1.0, 1.0, num, rng)  # [num] in requests, 0 to num
    slope = (end - start) * (start + end) / (4 * num)  # (end - start) / 2T
    return 2 * due / (start + np.sqrt(start**2 + 4 * slope * due))  # fit for slope 0


def read_trace(path: str) -> list[TraceRow]:
    """Mooncake's JSON lines (timestamp in ms, input_length, output_length) or Azure's CSV
    (TIMESTAMP, ContextTokens, GeneratedTokens); the first request is due at once."""
    make = azure_rows if path.endswith(".csv") else mooncake_rows
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = sorted(make(file))
    except (KeyError, ValueError, OSError) as error:
        raise LoadTestError(f"{path} is no trace: {reason(error)}") from error
    return [row._replace(due_s=row.due_s - rows[0].due_s) for row in rows]


def mooncake_rows(lines: Iterable[str]) -> list[TraceRow]:
    rows = [orjson.loads(line) for line in lines if line.strip()]
    return [TraceRow(r["timestamp"] / 1e3, r["input_length"], r["output_length"]) for r in rows]


def azure_rows(lines: Iterable[str]) -> list[TraceRow]:
    def row(cells: dict[str, str]) -> TraceRow:
        stamp = cells["TIMESTAMP"][:26]  # seven decimals there, six in Python
        at_s = datetime.fromisoformat(stamp).timestamp()
        return TraceRow(at_s, int(cells["ContextTokens"]), int(cells["GeneratedTokens"]))

    return [row(cells) for cells in csv.DictReader(lines)]
