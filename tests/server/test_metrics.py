"""/metrics: read back by Prometheus' own parser, compared with vLLM's series, and its cost."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType
from typing import Any

import aiohttp
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from asyncllm.engine.stats import IterationStats, SchedulerStats
from asyncllm.server.http import sse
from asyncllm.server.observability.metrics import Metrics
from asyncllm.server.serve import drain
from tests.server.fake_engine import FakeEngine
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving, until
from tests.server.test_http_disconnect import connect

# What vLLM 0.27 exposes of a text model on one GPU, as its /metrics and its loggers.py have it:
# type, and labels beside model_name and engine.
VLLM: dict[str, tuple[str, set[str]]] = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "kv_cache_usage_perc": ("gauge", set()),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "prompt_tokens_cached": ("counter", set()),
    "prompt_tokens_by_source": ("counter", {"source"}),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "iteration_tokens_total": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_inference_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_prefill_kv_computed_tokens": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "request_params_n": ("histogram", set()),
    "request_params_max_tokens": ("histogram", set()),
}
_TOKEN_TIME = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
               10.0, 20.0, 40.0, 80.0)  # fmt: skip
VLLM_BOUNDS = {
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "inter_token_latency_seconds": _TOKEN_TIME,
    "request_time_per_output_token_seconds": _TOKEN_TIME,
    "e2e_request_latency_seconds": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
        240.0, 480.0, 960.0, 1920.0, 7680.0,
    ),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
}  # fmt: skip


def families(text: str, prefix: str = "asyncllm") -> dict[str, Metric]:
    """By name without the prefix."""
    found = text_string_to_metric_families(text)
    return {f.name.removeprefix(f"{prefix}:"): f for f in found}


def value(text: str, name: str, **labels: str) -> float:
    for family in families(text).values():
        for sample in family.samples:
            if sample.name == f"asyncllm:{name}" and labels.items() <= sample.labels.items():
                return sample.value
    raise KeyError(name)


async def scrape(server: Server) -> str:
    status, text = await server.get("/metrics")
    assert status == 200
    return str(text)


def test_vllm_series() -> None:
    async def test() -> None:
        async with serving(metrics_prefix="vllm") as server:
            await server.post(CHAT, {"messages": HELLO, "max_tokens": 5})
            found = families(await scrape(server), "vllm")
        for name, (kind, labels) in VLLM.items():
            # A name that ends in _total is taken for a counter's by this parser.
            family = found[name]
            assert family.type == kind, name
            for sample in family.samples:
                own = sample.labels.keys() - {"le"}
                assert own == {"model_name", "engine"} | labels, sample
        for name, bounds in VLLM_BOUNDS.items():
            ours = {s.labels.get("le") for s in found[name].samples}
            assert {repr(float(bound)) for bound in bounds} < ours, name
        itl = found["inter_token_latency_seconds"].samples
        assert sum(float(s.labels.get("le", "inf")) < 0.01 for s in itl) >= 10
        info = found["cache_config_info"].samples[0]
        assert info.labels["block_size"] == "16" and info.labels["num_gpu_blocks"] == "100"

    run(test())


def test_every_histogram_is_sound() -> None:
    async def test() -> None:
        async with serving() as server:
            await server.post(CHAT, {"messages": HELLO, "max_tokens": 30, "n": 3})
            text = await scrape(server)
        num_histograms = 0
        for family in families(text).values():
            if family.type != "histogram":
                continue
            num_histograms += 1
            series: dict[tuple[Any, ...], dict[str, list[float]]] = {}
            for sample in family.samples:
                key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
                part = sample.name.rsplit("_", 1)[1]
                series.setdefault(key, {}).setdefault(part, []).append(sample.value)
            for parts in series.values():
                assert parts["bucket"] == sorted(parts["bucket"])
                assert [parts["bucket"][-1]] == parts["count"]
                assert len(parts["sum"]) == 1
        assert num_histograms >= 18
        assert value(text, "step_time_seconds_count", kind="decode") == 30
        assert value(text, "request_max_num_generation_tokens_sum") == 30
        assert value(text, "request_generation_tokens_sum") == 90

    run(test())


def test_labels_are_escaped() -> None:
    async def test() -> None:
        name = 'a "quoted" \\ 100% model\nof two lines'
        text = Metrics(FakeEngine(), name, "asyncllm").exposition().decode()
        samples = families(text)["num_requests_running"].samples
        assert [s.labels["model_name"] for s in samples] == [name]

    run(test())


def test_a_scrape_costs_the_same_whatever_happened() -> None:
    """Python calls, counted: a few per series and none per sample, so well under 1 ms."""

    async def test() -> None:
        engine = FakeEngine()
        metrics = Metrics(engine, "fake", "asyncllm")

        def num_calls() -> int:
            calls = 0

            def count(frame: FrameType, event: str, arg: object) -> None:
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                metrics.exposition()
            finally:
                sys.setprofile(None)
            return calls

        first, before = metrics.exposition(), num_calls()
        for _ in range(1000):
            engine.recorder.record(
                SchedulerStats(),
                IterationStats(num_generation_tokens=256, inter_token_latencies=[0.01] * 256),
            )
        assert abs(num_calls() - before) < 20  # reading /proc varies
        assert before < 1000
        num_samples = sum(not line.startswith(b"#") for line in first.splitlines())
        assert num_samples > 500

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_aborts_by_cause(stream: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.go.clear()
            async with aiohttp.ClientSession() as client:  # its end closes the connection
                call = client.post(server.url + COMPLETIONS, json={"prompt": "a", "stream": stream})
                task = asyncio.ensure_future(call)
                await until(lambda: server.engine.live)
                if stream:
                    await task
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: server.engine.aborted)
            assert server.engine.recorder.aborts == {"disconnect": 1}
            task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "b", "max_tokens": 9}))
            await until(lambda: server.engine.live)
            await drain(server.service, 0.0)
            await task
            assert server.engine.recorder.aborts == {"disconnect": 1, "shutdown": 1}
            text = await scrape(server)
            assert value(text, "request_aborts_total", cause="shutdown") == 1

    run(test())


def test_abort_of_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 10_000)
    monkeypatch.setattr(sse, "COALESCE_ABOVE_BYTES", 1000)

    async def test() -> None:
        async with serving(small_buffers=True) as server:
            server.engine.chunk_text = lambda text: text + "x" * 400_000
            writer = await connect(server, COMPLETIONS, {"prompt": "a", "stream": True})
            await until(lambda: server.engine.recorder.aborts)
            assert server.engine.recorder.aborts == {"slow_reader": 1}
            writer.close()

    run(test())
