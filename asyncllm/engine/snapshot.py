"""`Snapshot`: all that a live view of the engine shows, in one record that can be JSON.

`AsyncLLMEngine.snapshot()` takes one in about 0.15 ms on the loop, whatever the load. It only reads
what is counted anyway. `orjson.dumps(snapshot)` renders it. Percentiles are None, and rates 0, if
nothing happened in their window. Totals count from the start of the engine, so the difference of
two snapshots gives a rate over any window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, truediv

from asyncllm.engine.core import Replica
from asyncllm.engine.recorder import FINISH_REASONS, WINDOW_S, Counts, Histogram, Mark, Recorder
from asyncllm.engine.stats import SchedulerStats, StepRecord

RATE_WINDOW_S = 5.0
SHARES = (0.5, 0.9, 0.99)
MAX_PAGE_CELLS = 1024


@dataclass(slots=True, frozen=True)
class Percentiles:
    """Milliseconds over the last minute, exact to 5 %; None without values."""

    count: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


@dataclass(slots=True, frozen=True)
class Latencies:
    """The last minute's. `queue`, `e2e`, `time_per_output_token` are of finished requests."""

    time_to_first_token: Percentiles
    inter_token: Percentiles
    time_per_output_token: Percentiles
    e2e: Percentiles
    queue: Percentiles
    loop_lag: Percentiles


@dataclass(slots=True, frozen=True)
class Rates:
    """Over the last 5 s. `prefill_tokens_per_s` counts computed tokens only."""

    generation_tokens_per_s: float
    prefill_tokens_per_s: float
    device_busy_share: float  # 0 .. 1
    host_us_per_token: float | None  # total CPU time of the event loop's thread


@dataclass(slots=True, frozen=True)
class Totals:
    """Since the start of the engine."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache
    generation_tokens: int
    finished: dict[str, int]  # by reason: stop, length, abort, error
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions_swap: int
    preemptions_recompute: int


@dataclass(slots=True, frozen=True)
class Pages:
    """The KV cache. cells: a letter for every `pages_per_cell`-th page.

    "." free, "c" free but in the prefix cache, "u" used, "s" shared.
    """

    num_pages: int
    num_used: int
    num_host_pages: int
    num_used_host: int
    pages_per_cell: int
    cells: str  # at most 1024


@dataclass(slots=True, frozen=True)
class Snapshot:
    time: float  # Unix seconds
    monotonic: float  # by the clock of the steps' `start`
    running: int
    waiting: int
    swapped: int
    pages: Pages
    rates: Rates
    latencies: Latencies
    totals: Totals
    steps: list[StepRecord]  # the last ones, oldest first, at most 256


def take_snapshot(replicas: Sequence[Replica], last_steps: int) -> Snapshot:
    """A snapshot of all replicas together. Call it on the loop's thread."""
    for replica in replicas:
        replica.observe()  # includes all output that clients have
    now = time.monotonic()
    recorders = [replica.recorder for replica in replicas]
    stats = [replica.stats() for replica in replicas]
    marks = [recorder.mark(now) for recorder in recorders]
    return Snapshot(
        time=time.time(),
        monotonic=now,
        running=sum(each.num_running for each in stats),
        waiting=sum(each.num_waiting for each in stats),
        swapped=sum(each.num_swapped for each in stats),
        pages=_pages(replicas, stats),
        rates=_rates(marks, [r.mark_since(now - RATE_WINDOW_S) for r in recorders]),
        latencies=_latencies(recorders, marks, [r.mark_since(now - WINDOW_S) for r in recorders]),
        totals=_totals(recorders, stats),
        steps=_last_steps(recorders, last_steps),
    )


def _pages(replicas: Sequence[Replica], stats: Sequence[SchedulerStats]) -> Pages:
    num_pages = sum(each.num_pages for each in stats)
    # Each replica's last cell may be incomplete.
    every = max(-(-num_pages // (MAX_PAGE_CELLS - len(replicas) + 1)), 1)
    return Pages(
        num_pages=num_pages,
        num_used=sum(each.num_used_pages for each in stats),
        num_host_pages=sum(each.num_host_pages for each in stats),
        num_used_host=sum(each.num_used_host_pages for each in stats),
        pages_per_cell=every,
        cells="".join(replica.picture(every) for replica in replicas),
    )


def _last_steps(recorders: Sequence[Recorder], count: int) -> list[StepRecord]:
    steps: list[StepRecord] = []
    for recorder in recorders:
        first = max(len(recorder.timeline) - count, 0)
        steps += islice(recorder.timeline, first, None)
    if len(recorders) > 1:
        steps.sort(key=attrgetter("start"))
    return steps[max(len(steps) - count, 0) :]


def _rates(now: Sequence[Mark], since: Sequence[Mark | None]) -> Rates:
    """device_busy_share is the mean of all devices."""
    pairs = [(a, b) for a, b in zip(now, since, strict=True) if b is not None]
    if not pairs:
        return Rates(0.0, 0.0, 0.0, None)
    # A shorter time after a pause would give no meaningful rate.
    spans = [max(a.time - b.time, 1.0) for a, b in pairs]
    num_generated = [a.generation_tokens - b.generation_tokens for a, b in pairs]
    num_prefilled = [a.prefill_tokens - b.prefill_tokens for a, b in pairs]
    busy = [a.device_seconds - b.device_seconds for a, b in pairs]
    cpu = max(a.loop_cpu_seconds - b.loop_cpu_seconds for a, b in pairs)  # of one thread
    return Rates(
        generation_tokens_per_s=sum(map(truediv, num_generated, spans)),
        prefill_tokens_per_s=sum(map(truediv, num_prefilled, spans)),
        device_busy_share=sum(min(b / s, 1.0) for b, s in zip(busy, spans, strict=True)) / len(now),
        host_us_per_token=cpu * 1e6 / sum(num_generated) if any(num_generated) else None,
    )


def _latencies(
    recorders: Sequence[Recorder], now: Sequence[Mark], since: Sequence[Mark | None]
) -> Latencies:
    found = []
    for i, histogram in enumerate(recorders[0].windowed):
        counts: Counts = sum(mark.counts[i] for mark in now)  # type: ignore[assignment]
        for mark, before in zip(now, since, strict=True):
            counts = counts - (mark if before is None else before).counts[i]
        # A process that was started again counts from 0.
        found.append(_percentiles(histogram, counts.clip(min=0)))
    return Latencies(*found)


def _percentiles(histogram: Histogram, counts: Counts) -> Percentiles:
    count = int(counts.sum())
    if not count:
        return Percentiles(0)
    return Percentiles(count, *(s * 1000 for s in histogram.quantiles(SHARES, counts)))


def _totals(recorders: Sequence[Recorder], stats: Sequence[SchedulerStats]) -> Totals:
    return Totals(
        prompt_tokens=sum(r.prompt_tokens for r in recorders),
        cached_tokens=sum(r.cached_tokens for r in recorders),
        generation_tokens=sum(r.generation_tokens for r in recorders),
        finished={reason: sum(r.finished[reason] for r in recorders) for reason in FINISH_REASONS},
        prefix_cache_queries=sum(each.prefix_cache_queries for each in stats),
        prefix_cache_hits=sum(each.prefix_cache_hits for each in stats),
        preemptions_swap=sum(each.num_preemptions_swap for each in stats),
        preemptions_recompute=sum(each.num_preemptions_recompute for each in stats),
    )
