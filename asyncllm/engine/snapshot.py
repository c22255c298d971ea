"""`Snapshot`: everything a live view of the engine shows, in one JSON-able record.

Taken by `AsyncLLMEngine.snapshot()` in about 0.15 ms on the loop, whatever the load; it reads what
is counted anyway and changes nothing. `orjson.dumps(snapshot)` renders it. Percentiles and
per-second rates are None (rates 0) where nothing happened in their window. Totals count from the
start of the engine: the difference of two snapshots gives a rate over any other window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.recorder import FINISH_REASONS, WINDOW_S, Counts, Histogram, Mark, Recorder
from asyncllm.engine.stats import SchedulerStats, StepRecord

RATE_WINDOW_S = 5.0
SHARES = (0.5, 0.9, 0.99)
MAX_PAGE_CELLS = 1024


@dataclass(slots=True, frozen=True)
class Percentiles:
    """Milliseconds, over the last minute; None of nothing. Right to 5 %."""

    count: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


@dataclass(slots=True, frozen=True)
class Latencies:
    """The last minute's. `queue`, `e2e`, `time_per_output_token` count finished requests."""

    time_to_first_token: Percentiles
    inter_token: Percentiles
    time_per_output_token: Percentiles
    e2e: Percentiles
    queue: Percentiles
    loop_lag: Percentiles


@dataclass(slots=True, frozen=True)
class Rates:
    """Over the last 5 s. `prefill_tokens_per_s` counts computed tokens, not cached ones."""

    generation_tokens_per_s: float
    prefill_tokens_per_s: float
    device_busy_share: float  # 0 .. 1
    host_us_per_token: float | None  # CPU time of the event loop's thread, everything included


@dataclass(slots=True, frozen=True)
class Totals:
    """Since the start of the engine."""

    prompt_tokens: int
    cached_tokens: int  # of the prompts, from the prefix cache
    generation_tokens: int
    finished: dict[str, int]  # by reason: stop, length, abort, error
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions_swap: int
    preemptions_recompute: int


@dataclass(slots=True, frozen=True)
class Pages:
    """The KV cache. `cells` is its picture: one letter for every `pages_per_cell`-th page.

    "." free, "c" free but with content that the prefix cache may find, "u" used, "s" shared.
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
    monotonic: float  # the clock of the steps' `start`
    running: int
    waiting: int
    swapped: int
    pages: Pages
    rates: Rates
    latencies: Latencies
    totals: Totals
    steps: list[StepRecord]  # the last ones, oldest first, at most 256


def take_snapshot(
    recorder: Recorder, stats: SchedulerStats, blocks: BlockManager, last_steps: int
) -> Snapshot:
    """On the loop's thread."""
    now = time.monotonic()
    totals = recorder.mark(now)
    first = max(len(recorder.timeline) - last_steps, 0)
    every = max(-(-stats.num_pages // MAX_PAGE_CELLS), 1)
    return Snapshot(
        time=time.time(),
        monotonic=now,
        running=stats.num_running,
        waiting=stats.num_waiting,
        swapped=stats.num_swapped,
        pages=Pages(
            num_pages=stats.num_pages,
            num_used=stats.num_used_pages,
            num_host_pages=stats.num_host_pages,
            num_used_host=stats.num_used_host_pages,
            pages_per_cell=every,
            cells=blocks.device.picture(every),
        ),
        rates=_rates(totals, recorder.mark_since(now - RATE_WINDOW_S)),
        latencies=_latencies(recorder, totals, recorder.mark_since(now - WINDOW_S)),
        totals=_totals(recorder, stats),
        steps=list(islice(recorder.timeline, first, None)),
    )


def _rates(now: Mark, since: Mark | None) -> Rates:
    if since is None:
        return Rates(0.0, 0.0, 0.0, None)
    seconds = max(now.time - since.time, 1.0)  # the first instant after a pause is no rate
    num_generated = now.generation_tokens - since.generation_tokens
    cpu = now.loop_cpu_seconds - since.loop_cpu_seconds
    return Rates(
        generation_tokens_per_s=num_generated / seconds,
        prefill_tokens_per_s=(now.prefill_tokens - since.prefill_tokens) / seconds,
        device_busy_share=min((now.device_seconds - since.device_seconds) / seconds, 1.0),
        host_us_per_token=cpu * 1e6 / num_generated if num_generated else None,
    )


def _latencies(recorder: Recorder, now: Mark, since: Mark | None) -> Latencies:
    before: Sequence[Counts] = now.counts if since is None else since.counts
    return Latencies(
        *(
            _percentiles(histogram, counts - counts_before)
            for histogram, counts, counts_before in zip(
                recorder.windowed, now.counts, before, strict=True
            )
        )
    )


def _percentiles(histogram: Histogram, counts: Counts) -> Percentiles:
    count = int(counts.sum())
    if not count:
        return Percentiles(0)
    return Percentiles(count, *(s * 1000 for s in histogram.quantiles(SHARES, counts)))


def _totals(recorder: Recorder, stats: SchedulerStats) -> Totals:
    return Totals(
        prompt_tokens=recorder.prompt_tokens,
        cached_tokens=recorder.cached_tokens,
        generation_tokens=recorder.generation_tokens,
        finished={reason: recorder.finished[reason] for reason in FINISH_REASONS},
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        preemptions_swap=stats.num_preemptions_swap,
        preemptions_recompute=stats.num_preemptions_recompute,
    )
