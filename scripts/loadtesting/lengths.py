"""How long prompts and answers are: drawn from the seed or from a trace, one token at least."""

from __future__ import annotations

import numpy as np

from loadtesting.arrival import read_trace
from loadtesting.settings import Settings

LONGEST = 16  # times the mean: where the log-normal tail is cut


def draw_lengths(
    mean: int, dist: str, spread: float, num: int, rng: np.random.Generator
) -> np.ndarray:
    """[num] tokens. The log-normal's mean is `mean` too (its median is below), before the cut."""
    if dist == "fixed":
        return np.full(num, mean)
    if dist == "uniform":
        low, high = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        return rng.integers(low, max(low, high), num, endpoint=True)
    lengths = rng.lognormal(np.log(mean) - spread**2 / 2, spread, num)
    return np.clip(lengths.round(), 1, LONGEST * mean).astype(int)


def request_lengths(
    settings: Settings, num: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Own prompt tokens and output tokens of num requests, each [num]."""
    if settings.trace is not None:
        rows = read_trace(settings.trace)
        picked = [rows[i % len(rows)] for i in range(num)]
        inputs = np.array([max(1, row.input_len) for row in picked])
        return inputs, np.array([max(1, row.output_len) for row in picked])
    dist, spread = settings.length_dist, settings.length_spread
    return (
        draw_lengths(settings.input_len, dist, spread, num, rng),
        draw_lengths(settings.output_len, dist, spread, num, rng),
    )
