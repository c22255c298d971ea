"""/metrics: vLLM's names and meanings under our prefix, and what only one process can show.

Everything is counted elsewhere, once per step (`engine/recorder.py`); a scrape reads it. Names,
labels and meanings were compared with vLLM 0.27. Where ours has more labels, it is another series:
vLLM's keep their label sets, but for more buckets below 10 ms (each of vLLM's bounds is kept).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from aiohttp import hdrs, web
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.recorder import (
    ABORT_CAUSES,
    FINISH_REASONS,
    LAG,
    LEAD,
    STEP_TIME,
    Histogram,
    Recorder,
)
from asyncllm.engine.stats import SchedulerStats
from asyncllm.server.observability.exposition import Exposition, Labels, Read, Source
from asyncllm.step_plan import StepKind

# Routes that vLLM's web framework does not count either.
UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version")


class Metrics:
    """Scrape it on the loop's thread, whose CPU time is one of the values."""

    def __init__(self, engine: AsyncLLMEngine, model_name: str, prefix: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._prefix = prefix
        self._exposition: Exposition | None = None  # the number of pages is not known yet
        self._caches = ""  # made with it
        self._process = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self._responses = Counter[tuple[str, str, int]]()  # route, method, class of status

    async def count_response(self, request: web.Request, response: web.StreamResponse) -> None:
        """Labels of a bounded number of values, whatever clients send."""
        resource = request.match_info.route.resource
        handler = "none" if resource is None else resource.canonical
        if not handler.endswith(UNCOUNTED):  # a proxy's prefix may stand before it
            method = request.method if request.method in hdrs.METH_ALL else "none"
            self._responses[handler, method, response.status // 100] += 1

    def exposition(self) -> bytes:
        """Raises `EngineDeadError` where there is no engine to read."""
        engine, cpu = self._engine, time.thread_time()
        sources = [
            Source(
                each.stats(), each.recorder, each.work, cpu, int(each.health() is None),
                each.ranks(),
            )
            for each in engine.replicas
        ]  # fmt: skip
        if self._exposition is None:
            self._exposition = self._make_exposition(sources)
            self._caches = self._make_caches(sources)
        adapters = self._adapters(sources) if engine.config.enable_lora else ""
        ours = self._exposition.render(sources) + self._caches + adapters
        return (ours + self._counted_responses()).encode() + generate_latest(self._process)

    def _counted_responses(self) -> str:
        name = "http_requests_total"
        lines = [f"# HELP {name} Responses begun, by route and class of status."]
        lines += [f"# TYPE {name} counter"]
        for (handler, method, status), count in self._responses.items():
            labels = f'handler="{handler}",method="{method}",status="{status}xx"'
            lines.append(f"{name}{{{labels}}} {count}")
        return "\n".join(lines) + "\n"

    def _labels(self, rank: int) -> Labels:
        """vLLM's, of its data-parallel engines."""
        first = self._engine.config.data_parallel_rank
        return {"model_name": self._model_name, "engine": str(first + rank)}

    def _make_exposition(self, sources: Sequence[Source]) -> Exposition:
        exposition = Exposition(self._prefix, [*map(self._labels, range(len(sources)))])
        recorder = sources[0].recorder  # all are alike
        _add_ranks(exposition, self._engine.config.mesh.size)
        _add_scheduler(exposition)
        _add_tokens(exposition)
        _add_requests(exposition, recorder)
        _add_steps(exposition, recorder)
        return exposition

    def _make_caches(self, sources: Sequence[Source]) -> str:
        """Constants, with labels that differ by what each engine's memory holds."""
        caches = [
            {**self._labels(rank), **_cache_labels(self._engine, source.stats)}
            for rank, source in enumerate(sources)
        ]
        exposition = Exposition(self._prefix, caches)
        exposition.add("gauge", "cache_config_info", "The KV cache.", ({}, lambda s: 1))
        return exposition.render(sources)

    def _adapters(self, sources: Sequence[Source]) -> str:
        """One sample, with vLLM's labels: names change, so it is made anew for each scrape."""
        running, waiting = map(",".join, self._engine.lora_activity())
        labels = {
            **self._labels(0),
            "max_lora": str(self._engine.config.max_loras),
            "running_lora_adapters": running,
            "waiting_lora_adapters": waiting,
        }
        exposition = Exposition(self._prefix, [labels])
        exposition.add("gauge", "lora_requests_info", "LoRA adapters in use, and waited for.",
                       ({}, lambda s: time.time()))  # fmt: skip
        return exposition.render(sources)


def _add_ranks(to: Exposition, num_ranks: int) -> None:
    to.add("gauge", "engine_up", "1 where the engine serves requests.",
           ({}, lambda s: s.is_up))  # fmt: skip
    to.add("gauge", "rank_up", "0 of the rank whose loss ended the others.",
           *(({"rank": str(rank)}, _rank_up(rank)) for rank in range(num_ranks)))  # fmt: skip
    to.add("gauge", "rank_lag_seconds",
           "How long a rank beyond the first has not answered, or kept the others waiting.",
           *(({"rank": str(rank)}, _rank_lag(rank)) for rank in range(num_ranks)))  # fmt: skip


def _rank_up(rank: int) -> Read:
    return lambda s: 1 if s.ranks[rank].is_up else 0


def _rank_lag(rank: int) -> Read:
    return lambda s: s.ranks[rank].lag_seconds


def _add_scheduler(to: Exposition) -> None:
    to.add("gauge", "num_requests_running", "Sequences that own a slot.",
           ({}, lambda s: s.stats.num_running))  # fmt: skip
    to.add("gauge", "num_requests_waiting", "Sequences that wait, swapped ones included.",
           ({}, lambda s: s.stats.num_waiting + s.stats.num_swapped))  # fmt: skip
    to.add("gauge", "num_requests_waiting_by_reason",
           "Waiting for pages, a slot or a step's tokens (capacity), or swapped out (swapped).",
           ({"reason": "capacity"}, lambda s: s.stats.num_waiting),
           ({"reason": "swapped"}, lambda s: s.stats.num_swapped))  # fmt: skip
    to.add("gauge", "num_requests_swapped", "Sequences whose pages are in CPU memory.",
           ({}, lambda s: s.stats.num_swapped))  # fmt: skip
    to.add("gauge", "kv_cache_usage_perc", "Share of KV pages in use, 1 is all.",
           ({}, lambda s: s.stats.kv_cache_usage))  # fmt: skip
    to.add("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
           ({}, lambda s: s.stats.prefix_cache_queries))  # fmt: skip
    to.add("counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache.",
           ({}, lambda s: s.stats.prefix_cache_hits))  # fmt: skip
    to.add("counter", "num_preemptions", "Sequences that lost their pages for others.",
           ({}, lambda s: s.stats.num_preemptions_swap + s.stats.num_preemptions_recompute),
           )  # fmt: skip
    to.add("counter", "preemptions_by_mode", "Preempted to CPU memory, or to be recomputed.",
           ({"mode": "swap"}, lambda s: s.stats.num_preemptions_swap),
           ({"mode": "recompute"}, lambda s: s.stats.num_preemptions_recompute))  # fmt: skip
    to.add("counter", "swapped_pages", "KV pages moved between device and CPU memory.",
           ({"direction": "out"}, lambda s: s.recorder.swapped_out_pages),
           ({"direction": "in"}, lambda s: s.recorder.swapped_in_pages))  # fmt: skip


def _add_tokens(to: Exposition) -> None:
    to.add("counter", "prompt_tokens", "Prompt tokens of requests that got their first token.",
           ({}, lambda s: s.recorder.prompt_tokens))  # fmt: skip
    to.add("counter", "prompt_tokens_cached", "Of these, taken from the prefix cache.",
           ({}, lambda s: s.recorder.cached_tokens))  # fmt: skip
    to.add("counter", "prompt_tokens_by_source", "Prompt tokens computed, or found cached.",
           ({"source": "local_compute"},
            lambda s: s.recorder.prompt_tokens - s.recorder.cached_tokens),
           ({"source": "local_cache_hit"}, lambda s: s.recorder.cached_tokens))  # fmt: skip
    to.add("counter", "generation_tokens", "Tokens generated.",
           ({}, lambda s: s.recorder.generation_tokens))  # fmt: skip


def _add_requests(to: Exposition, recorder: Recorder) -> None:
    to.add("counter", "request_success", "Finished requests, by reason.",
           *(({"finished_reason": reason}, _finished(reason)) for reason in FINISH_REASONS),
           )  # fmt: skip
    to.add("counter", "request_aborts",
           "Aborted requests: by the application, a client that left or did not read, or us.",
           *(({"cause": cause}, _aborted(cause)) for cause in ABORT_CAUSES))  # fmt: skip
    for name, help_text, attribute in (
        ("time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token"),
        ("inter_token_latency_seconds", "Between a sequence's tokens.", "inter_token_latency"),
        ("request_time_per_output_token_seconds", "Mean of a request's tokens after its first.",
         "time_per_output_token"),
        ("e2e_request_latency_seconds", "Arrival to the end.", "e2e"),
        ("request_queue_time_seconds", "Arrival to first scheduled.", "queue_time"),
        ("request_inference_time_seconds", "First scheduled to last token.", "inference_time"),
        ("request_prefill_time_seconds", "First scheduled to first token.", "prefill_time"),
        ("request_decode_time_seconds", "First to last token.", "decode_time"),
        ("request_prompt_tokens", "Prompt tokens of a request.", "prompt_lengths"),
        ("request_prefill_kv_computed_tokens", "Of these, not from the prefix cache.",
         "computed_lengths"),
        ("request_generation_tokens", "Generated tokens of a request, of all its n.",
         "generation_lengths"),
        ("request_max_num_generation_tokens", "Generated tokens of its longest answer.",
         "longest_generations"),
        ("request_params_n", "Parameter n.", "n"),
        ("request_params_max_tokens", "Parameter max_tokens, or what stands for it.",
         "max_tokens"),
        ("iteration_tokens_total", "Prompt tokens computed and tokens generated in a step.",
         "iteration_tokens"),
    ):  # fmt: skip
        find: Callable[[Recorder], Histogram] = attrgetter(attribute)
        to.add_histogram(name, help_text, find(recorder).bounds, ({}, find))


def _add_steps(to: Exposition, recorder: Recorder) -> None:
    """Device, host and loop by one clock, as only one process can measure."""
    to.add_histogram("step_time_seconds", "A step on the device, by kind.", STEP_TIME,
                     *(({"kind": kind}, _step_time(kind)) for kind in StepKind))  # fmt: skip
    to.add_histogram("launch_lead_seconds",
                     "What was left of the step before at a launch; 0: the device had run dry.",
                     LEAD, ({}, attrgetter("launch_lead")))  # fmt: skip
    to.add_histogram("loop_lag_seconds", "Lateness of the event loop, while steps run.",
                     LAG, ({}, attrgetter("loop_lag")))  # fmt: skip
    to.add("counter", "device_busy_seconds", "Time the device had a step; its rate is the share.",
           ({}, lambda s: s.recorder.device_seconds))  # fmt: skip
    to.add("counter", "device_starved_seconds", "Time between two steps, with work at hand.",
           ({}, lambda s: s.recorder.starved_seconds))  # fmt: skip
    to.add("counter", "host_seconds",
           "The loop's time in the verbs of a step; a thread's, beside it, in constrain.",
           *(({"verb": verb}, _host_seconds(verb)) for verb in recorder.host_seconds),
           )  # fmt: skip
    to.add("counter", "loop_cpu_seconds", "CPU time of the loop's thread, HTTP included.",
           ({}, lambda s: s.loop_cpu_seconds))  # fmt: skip
    to.add("counter", "graph_steps", "Steps replayed from a graph, or launched kernel by kernel.",
           *(({"kind": kind, "mode": mode}, _ran(kind, mode))
             for kind in ("decode", "mixed") for mode in ("graph", "eager")))  # fmt: skip
    to.add("counter", "step_tokens", "Tokens that steps computed.",
           ({}, lambda s: s.work.num_tokens))  # fmt: skip
    to.add("counter", "padding_tokens", "Tokens computed only to fill a graph's size.",
           ({}, lambda s: s.work.num_padding))  # fmt: skip


def _step_time(kind: StepKind) -> Callable[[Recorder], Histogram]:
    return lambda recorder: recorder.step_time[kind]


def _finished(reason: str) -> Read:
    return lambda s: s.recorder.finished[reason]  # type: ignore[index]


def _aborted(cause: str) -> Read:
    return lambda s: s.recorder.aborts[cause]  # type: ignore[index]


def _host_seconds(verb: str) -> Read:
    return lambda s: s.recorder.host_seconds[verb]


def _ran(kind: str, mode: str) -> Read:
    return lambda s: s.work.steps[kind, mode]


def _cache_labels(engine: AsyncLLMEngine, stats: SchedulerStats) -> Labels:
    config = engine.config
    num_tokens = stats.num_pages // stats.num_groups * config.block_size
    return {
        "kv_cache_size_tokens": str(num_tokens),
        "kv_cache_max_concurrency": f"{num_tokens / engine.max_model_len:.2f}",
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(stats.num_pages),
        "num_cpu_blocks": str(stats.num_host_pages),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
    }


METRICS = web.AppKey("metrics", Metrics)
