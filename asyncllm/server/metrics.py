"""/metrics: vLLM's names and meanings under our prefix, recorded once per step.

prometheus_client takes about 2 us for one histogram observation, which at one inter-token latency
per token would be a fifth of a token's whole budget. So totals are kept in plain numbers here
(0.1 us), and its registry only renders them when somebody scrapes. Gauges are read at that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from asyncllm.engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
         7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_TIME = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009,
               0.01, 0.0125, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
               1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_TIME = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
                 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000,
           200000)  # fmt: skip
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N = (1, 2, 5, 10, 20)

FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts per bucket; the last one is +Inf."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float | None) -> None:
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def cumulative(self) -> list[tuple[str, float]]:
        seen = 0
        buckets = []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(seen)))
        return buckets


_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time to first token.", _TTFT),
    "inter_token_latency_seconds": ("Time between tokens.", _TOKEN_TIME),
    "request_time_per_output_token_seconds": ("Mean time per token of a request.", _TOKEN_TIME),
    "e2e_request_latency_seconds": ("Arrival to last token.", _REQUEST_TIME),
    "request_queue_time_seconds": ("Arrival to first scheduled.", _REQUEST_TIME),
    "request_prefill_time_seconds": ("First scheduled to first token.", _REQUEST_TIME),
    "request_decode_time_seconds": ("First to last token.", _REQUEST_TIME),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
    "request_params_n": ("Parameter n of a request.", _N),
    "request_params_max_tokens": ("Parameter max_tokens of a request.", _TOKENS),
    "iteration_tokens_total": ("Tokens in one step.", _ITERATION_TOKENS),
}


class Metrics(Collector):
    """A `StatLogger` that Prometheus can read. Create it before the engine's first step."""

    def __init__(self, stats: Callable[[], SchedulerStats], model_name: str, prefix: str) -> None:
        self._stats = stats
        self._labels = [model_name]
        self._prefix = prefix
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._ttft = self._histograms["time_to_first_token_seconds"]
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def record(self, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens
        if num_tokens := iteration.num_prompt_tokens + iteration.num_generation_tokens:
            self._step_tokens.observe(num_tokens)
        self._ttft.observe_all(iteration.time_to_first_tokens)
        self._itl.observe_all(iteration.inter_token_latencies)
        for request in iteration.finished:
            self._record_finished(request)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests running.", stats.num_running)
        waiting = stats.num_waiting + stats.num_swapped
        yield self._gauge("num_requests_waiting", "Requests waiting or swapped out.", waiting)
        yield self._gauge("num_requests_swapped", "Requests swapped out.", stats.num_swapped)
        yield self._gauge("kv_cache_usage_perc", "KV pages in use, 1 is all.", stats.kv_cache_usage)
        yield from self._counters(stats)
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(
                self._name(name), _HISTOGRAMS[name][0], labels=["model_name"]
            )
            family.add_metric(self._labels, histogram.cumulative(), histogram.total)
            yield family

    def _counters(self, stats: SchedulerStats) -> Iterator[Metric]:
        preemptions = stats.num_preemptions_swap + stats.num_preemptions_recompute
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found cached.", hits)
        yield self._counter("num_preemptions", "Preemptions.", preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self._generation_tokens)
        success = CounterMetricFamily(
            self._name("request_success"),
            "Finished requests.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._finished.items():
            success.add_metric([*self._labels, reason], count)
        yield success

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self._finished[request.finish_reason] += 1
        values = {
            "request_time_per_output_token_seconds": request.time_per_output_token,
            "e2e_request_latency_seconds": request.e2e_time,
            "request_queue_time_seconds": request.queue_time,
            "request_prefill_time_seconds": request.prefill_time,
            "request_decode_time_seconds": request.decode_time,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": request.num_generation_tokens,
            "request_params_n": request.n,
            "request_params_max_tokens": request.max_tokens,
        }
        for name, value in values.items():
            self._histograms[name].observe(value)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._name(name), help_text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        """The exposition adds `_total` to the name."""
        family = CounterMetricFamily(self._name(name), help_text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family


METRICS = web.AppKey("metrics", Metrics)
