"""The engine's statistics: totals since the start, and the last minute. Updated once per step.

It is a `StatLogger` that is always active. /metrics publishes the totals, `snapshot.py` the last
minute. Values of many rows (inter-token latencies) are binned once per step by numpy; nothing is
done per token. The last minute is the difference between the totals and a copy of them (`Mark`),
taken about once a second, so no value is binned twice.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from asyncllm.engine.stats import (
    AbortCause,
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
    StatLogger,
    StepRecord,
)
from asyncllm.outputs import FinishReason
from asyncllm.step_plan import StepKind

logger = logging.getLogger("asyncllm")

WINDOW_S = 60.0
MARK_EVERY_S = 1.0
TIMELINE_STEPS = 256

# vLLM's buckets and more below 10 ms, so each of vLLM's bounds is also a bound here.
TTFT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
        0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_TIME = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01,
              0.0125, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
              2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST_TIME = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0,
                2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
                1920.0, 7680.0)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000,
          200000)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N = (1, 2, 5, 10, 20)
STEP_TIME = (0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006,
             0.007, 0.008, 0.009, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0,
             2.5)  # fmt: skip
LEAD = (0.0, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05,
        0.1, 0.25)  # fmt: skip
LAG = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
       5.0)  # fmt: skip

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
ABORT_CAUSES: tuple[AbortCause, ...] = get_args(AbortCause)

Counts = np.ndarray  # int64 [bins]
MOST_UNBINNED = 1024  # values; binning one takes 1 us, binning this many 30 us


class Histogram:
    """A histogram with Prometheus buckets and quantiles.

    Its bins are finer than the published buckets, whose bounds are among the bins' edges. Bin i
    holds edges[i-1] < value <= edges[i], as Prometheus' `le` demands; the last bin is open. A
    quantile is exact to the width of a bin: 5 % with `latency_edges`. Values are binned when the
    histogram is read, or when many have come.
    bounds: the published buckets, ascending. edges: additional edges for finer quantiles.
    """

    def __init__(self, bounds: Sequence[float], edges: Sequence[float] = ()) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._edges = np.unique(np.array([*self.bounds, *edges]))
        self._edge_list: list[float] = self._edges.tolist()
        self._last_bins = np.searchsorted(self._edges, self.bounds)  # the last bin of each bucket
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
        """The count of each bin; do not change it."""
        if self._unbinned:
            self._bin()
        return self._counts

    @property
    def total(self) -> float:
        """The sum of all values."""
        if self._unbinned:
            self._bin()
        return self._total

    def load(self, counts: Sequence[int], total: float) -> None:
        """Replace its counts by those of another histogram with the same edges."""
        self._unbinned.clear()
        self._counts, self._total = np.array(counts, np.int64), total

    def cumulative(self) -> list[int]:
        """The number of values up to each of `bounds`, and then of all values."""
        sums = self.counts.cumsum()
        return [*sums[self._last_bins].tolist(), int(sums[-1])]

    def quantiles(self, shares: Sequence[float], counts: Counts) -> list[float]:
        """The upper edge of the bin that holds each quantile.

        counts: `self.counts`, or the difference of two copies. Raises `ValueError` if it is empty.
        """
        sums = counts.cumsum()
        if not sums[-1]:
            raise ValueError("quantiles of nothing")
        bins = np.searchsorted(sums, np.asarray(shares) * sums[-1])
        return [self._edge_list[min(b, len(self._edge_list) - 1)] for b in bins.tolist()]


def latency_edges() -> list[float]:
    """Bin edges in seconds, from 20 us to ten minutes, in steps of 5 %."""
    first, last = 20e-6, 600.0
    return np.geomspace(first, last, 1 + int(np.log(last / first) / np.log(1.05))).tolist()


@dataclass(slots=True, frozen=True)
class Mark:
    """A copy of the totals at some time."""

    time: float  # monotonic
    counts: tuple[Counts, ...]  # of `Recorder.windowed`
    generation_tokens: int
    prefill_tokens: int
    device_seconds: float
    loop_cpu_seconds: float


class Recorder:
    """Times in seconds, lengths in tokens."""

    def __init__(self, observers: list[StatLogger] | None = None) -> None:
        """observers: get each record as well. One that raises gets no more, as none may end
        requests."""
        self.observers = [] if observers is None else observers
        fine = latency_edges()
        self.time_to_first_token = Histogram(TTFT, fine)
        self.inter_token_latency = Histogram(TOKEN_TIME, fine)
        self.time_per_output_token = Histogram(TOKEN_TIME, fine)
        self.e2e = Histogram(REQUEST_TIME, fine)
        self.queue_time = Histogram(REQUEST_TIME, fine)
        self.prefill_time = Histogram(REQUEST_TIME)
        self.decode_time = Histogram(REQUEST_TIME)
        self.inference_time = Histogram(REQUEST_TIME)
        self.prompt_lengths = Histogram(TOKENS)
        self.generation_lengths = Histogram(TOKENS)
        self.longest_generations = Histogram(TOKENS)  # the longest of n sequences
        self.max_tokens = Histogram(TOKENS)
        self.computed_lengths = Histogram(TOKENS)  # prompt tokens that were not cached
        self.n = Histogram(N)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.step_time = {kind: Histogram(STEP_TIME) for kind in StepKind}
        self.launch_lead = Histogram(LEAD)
        self.loop_lag = Histogram(LAG, fine)
        self.windowed = (
            self.time_to_first_token,
            self.inter_token_latency,
            self.time_per_output_token,
            self.e2e,
            self.queue_time,
            self.loop_lag,
        )
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.prefill_tokens = 0  # computed ones: without cached, with recomputed tokens
        self.device_seconds = 0.0
        self.starved_seconds = 0.0
        self.swapped_out_pages = 0
        self.swapped_in_pages = 0
        self.finished: Counter[FinishReason] = Counter()
        self.aborts: Counter[AbortCause] = Counter()
        # Wall time of the methods of a step, on the loop; `constrain` in a thread.
        self.host_seconds = dict.fromkeys(("plan", "launch", "finish", "constrain"), 0.0)
        self.timeline: deque[StepRecord] = deque(maxlen=TIMELINE_STEPS)
        self._marks: deque[Mark] = deque()

    # --- a step --------------------------------------------------------------------------------

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        now = time.monotonic()
        if not self._marks or now - self._marks[-1].time >= MARK_EVERY_S:
            self._marks.append(self.mark(now))
            while self._marks[0].time < now - WINDOW_S:
                self._marks.popleft()
        self.prompt_tokens += iteration.num_prompt_tokens
        self.cached_tokens += iteration.num_cached_tokens
        self.generation_tokens += iteration.num_generation_tokens
        self.time_to_first_token.observe(*iteration.time_to_first_tokens)
        self.inter_token_latency.observe(*iteration.inter_token_latencies)
        if iteration.step is not None:
            self._record_step(iteration.step)
            # As in vLLM: computed prompt tokens plus generated tokens.
            num_generated = iteration.num_generation_tokens
            self.iteration_tokens.observe(iteration.step.prefill_tokens + num_generated)
        for request in iteration.finished:
            self._record_finished(request)
        for observer in list(self.observers):
            try:
                observer.record(scheduler, iteration)
            except Exception:
                logger.exception("%r failed, and gets no more records", observer)
                self.observers.remove(observer)

    def _record_step(self, step: StepRecord) -> None:
        self.timeline.append(step)
        self.step_time[step.kind].observe(step.duration)
        self.device_seconds += step.duration
        self.starved_seconds += step.starved
        self.swapped_out_pages += step.num_swap_out
        self.swapped_in_pages += step.num_swap_in
        if step.launch_lead is not None:
            self.launch_lead.observe(max(step.launch_lead, 0.0))
        self.prefill_tokens += step.prefill_tokens

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.finished[request.finish_reason] += 1
        self.e2e.observe(request.e2e_time)
        self.prompt_lengths.observe(request.num_prompt_tokens)
        self.computed_lengths.observe(request.num_prompt_tokens - request.num_cached_tokens)
        self.generation_lengths.observe(request.num_generation_tokens)
        self.longest_generations.observe(request.max_num_generation_tokens)
        self.max_tokens.observe(request.max_tokens)
        self.n.observe(request.n)
        _observe(self.queue_time, request.queue_time)
        _observe(self.prefill_time, request.prefill_time)
        _observe(self.decode_time, request.decode_time)
        _observe(self.time_per_output_token, request.time_per_output_token)
        if request.prefill_time is not None and request.decode_time is not None:
            self.inference_time.observe(request.prefill_time + request.decode_time)

    # --- the last minute ---------------------------------------------------------------------

    def mark(self, now: float) -> Mark:
        """The current totals. Call it on the loop's thread, whose CPU time is one of them."""
        return Mark(
            time=now,
            counts=tuple(histogram.counts.copy() for histogram in self.windowed),
            generation_tokens=self.generation_tokens,
            prefill_tokens=self.prefill_tokens,
            device_seconds=self.device_seconds,
            loop_cpu_seconds=time.thread_time(),
        )

    def mark_since(self, earliest: float) -> Mark | None:
        """The first mark at or after `earliest`; None if there is none."""
        return next((mark for mark in self._marks if mark.time >= earliest), None)


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)
