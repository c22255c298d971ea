"""The server's own /metrics, read before and after: what it says happened in between.

Only the text format is known here, no server's names: counters become differences, histograms a
count and a mean. Names keep the server's prefix (vllm:, sglang:, asyncllm:); label sets are summed.
The server's queue time and its token counts stand beside the client's, who can see neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import aiohttp

from loadtesting.settings import Settings

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)(?: \d+)?$", re.MULTILINE)
PROCESS = ("process_", "python_", "go_", "http_")


def parse(exposition: str) -> dict[str, float]:
    """Sum over label sets of each sample name, buckets left out."""
    totals: dict[str, float] = {}
    for name, value in LINE.findall(exposition):
        if not name.endswith(("_bucket", "_created")) and not name.startswith(PROCESS):
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Counters that moved, and of each histogram that did, `_count` and `_mean`."""
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    found: dict[str, float] = {}
    for name, delta in moved.items():
        base = name.removesuffix("_count")
        if name.endswith("_count") and f"{base}_sum" in moved:
            if delta > 0:
                found[name] = delta
                found[f"{base}_mean"] = moved[f"{base}_sum"] / delta
        elif name.endswith("_total") and delta != 0 and math.isfinite(delta):
            found[name] = delta
    return found


def by_suffix(metrics: Mapping[str, float], suffix: str) -> float | None:
    """A figure under any server's prefix."""
    return next((v for name, v in metrics.items() if name.split(":")[-1] == suffix), None)


async def scrape(session: aiohttp.ClientSession, settings: Settings) -> dict[str, float] | None:
    """None: the server has no /metrics to read, which is reported and no failure."""
    try:
        async with session.get(f"{settings.base_url}/metrics") as response:
            return parse(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
