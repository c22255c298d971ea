"""Models, tokenize, detokenize, health, version, metrics."""

from __future__ import annotations

import asyncio
from datetime import datetime

import anthropic
import pytest

import asyncllm.server.info as info
from tests.server.fake_engine import BOS, MAX_MODEL_LEN
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, run, serving, until


def test_models() -> None:
    async def test() -> None:
        async with serving() as server:
            _, body = await server.get("/v1/models")
            _, alias = await server.get("/v1/models/fake-alias")
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["fake", "fake-alias"]
        assert alias == body["data"][1]
        created = alias.pop("created")
        assert datetime.fromisoformat(alias.pop("created_at")).timestamp() == created
        assert alias == {
            "id": "fake-alias",
            "object": "model",
            "owned_by": "asyncllm",
            "root": "some/repository",
            "parent": None,
            "max_model_len": MAX_MODEL_LEN,
            "type": "model",
            "display_name": "fake-alias",
        }

    run(test())


def test_models_as_the_anthropic_client_lists_them() -> None:
    async def test() -> None:
        async with (
            serving() as server,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
        ):
            models = [model async for model in client.models.list()]
            one = await client.models.retrieve("fake")
        assert [model.display_name for model in models] == ["fake", "fake-alias"]
        assert one.created_at.year > 2000

    run(test())


def test_model_name_with_slash() -> None:
    async def test() -> None:
        async with serving() as server:
            server.service.model_names = ("org/model",)
            assert (await server.get("/v1/models/org/model"))[1]["id"] == "org/model"

    run(test())


def test_tokenize() -> None:
    async def test() -> None:
        async with serving() as server:
            _, plain = await server.post("/tokenize", {"prompt": "hi"})
            _, bare = await server.post(
                "/tokenize",
                {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
            )
            _, chat = await server.post("/tokenize", {"messages": HELLO, "model": "fake"})
            large = "x" * 10_000
            _, threaded = await server.post("/tokenize", {"prompt": large})
            both = await server.post("/tokenize", {"prompt": "hi", "messages": HELLO})
        assert plain == {
            "count": 3,
            "max_model_len": MAX_MODEL_LEN,
            "tokens": [BOS, 104, 105],
            "token_strs": None,
        }
        assert bare["tokens"] == [104, 105]
        assert bare["token_strs"] == ["Ġ104", "Ġ105"]  # the vocabulary's own spelling
        assert bytes(chat["tokens"]) == b"<user>Hello<assistant>"
        assert threaded["count"] == 10_001
        assert both[0] == 400

    run(test())


def test_tokenizer_info_is_opt_in() -> None:
    async def test() -> None:
        async with serving() as server:
            assert (await server.get("/tokenizer_info"))[0] == 404
        async with serving(enable_tokenizer_info_endpoint=True) as server:
            status, body = await server.get("/tokenizer_info")
        assert status == 200
        assert body["tokenizer_class"] == "FakeTokenizer" and body["chat_template"]

    run(test())


def test_tokenize_refuses_what_it_cannot_do() -> None:
    async def test() -> None:
        async with serving() as server:
            for name in ("mm_processor_kwargs", "media_io_kwargs"):
                status, body = await server.post("/tokenize", {"prompt": "a", name: {"b": 1}})
                assert (status, body["error"]["param"]) == (400, name)
                assert (await server.post("/tokenize", {"prompt": "a", name: {}}))[0] == 200

    run(test())


def test_detokenize() -> None:
    async def test() -> None:
        async with serving() as server:
            _, body = await server.post("/detokenize", {"tokens": [104, 105]})
            over, _ = await server.post("/detokenize", {"tokens": [256]})
            under, _ = await server.post("/detokenize", {"tokens": [-1]})
            empty = await server.post("/detokenize", {"tokens": []})
        assert body == {"prompt": "hi"}
        assert (over, under) == (400, 400)
        assert empty == (200, {"prompt": ""})

    run(test())


def test_health_and_version() -> None:
    async def test() -> None:
        async with serving() as server:
            assert await server.get("/health") == (200, "")
            server.engine.unhealthy = "no step for 30 s"
            status, body = await server.get("/health")
            assert (status, body["error"]["message"]) == (503, "no step for 30 s")
            server.engine.unhealthy = None
            server.service.draining = True
            assert (await server.get("/health"))[0] == 503
            assert (await server.get("/ping"))[0] == 503
            assert await server.get("/version") == (200, {"version": info.VERSION})

    run(test())


def test_metrics() -> None:
    async def test() -> None:
        async with serving(metrics_prefix="vllm") as server:
            await server.post(CHAT, {"messages": HELLO, "max_tokens": 5, "n": 2})
            task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a"}))
            server.engine.go.clear()
            await until(lambda: server.engine.live)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.quiet()
            status, text = await server.get("/metrics")
        assert status == 200
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        label = '{engine="0",model_name="fake"}'
        assert lines[f"vllm:num_requests_running{label}"] == "0"
        assert lines[f"vllm:num_requests_waiting{label}"] == "0"
        assert lines[f"vllm:kv_cache_usage_perc{label}"] == "0.0"
        assert lines[f"vllm:prompt_tokens_total{label}"] == "22"
        assert lines[f"vllm:generation_tokens_total{label}"] == "10"
        for reason, count in {"length": "1", "abort": "1", "stop": "0"}.items():
            labels = f'engine="0",finished_reason="{reason}",model_name="fake"'
            assert lines[f"vllm:request_success_total{{{labels}}}"] == count
        for cause, count in {"disconnect": "1", "shutdown": "0"}.items():
            labels = f'cause="{cause}",engine="0",model_name="fake"'
            assert lines[f"vllm:request_aborts_total{{{labels}}}"] == count
        assert lines[f"vllm:time_to_first_token_seconds_count{label}"] == "1"
        assert lines[f"vllm:inter_token_latency_seconds_count{label}"] == "4"
        buckets = {
            bound: lines[
                f'vllm:inter_token_latency_seconds_bucket{{engine="0",le="{bound}",model_name="fake"}}'
            ]
            for bound in ("0.0015", "0.002", "+Inf")
        }
        assert buckets == {"0.0015": "0", "0.002": "4", "+Inf": "4"}
        assert float(lines[f"vllm:inter_token_latency_seconds_sum{label}"]) == 0.008
        assert lines[f"vllm:request_params_n_sum{label}"] == "3.0"
        for name in (
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "num_preemptions_total",
            "request_time_per_output_token_seconds_count",
            "e2e_request_latency_seconds_count",
            "request_queue_time_seconds_count",
            "request_prefill_time_seconds_count",
            "request_decode_time_seconds_count",
            "request_prompt_tokens_count",
            "request_generation_tokens_count",
            "request_params_max_tokens_count",
            "iteration_tokens_total_count",
        ):
            assert f"vllm:{name}{label}" in lines, name

    run(test())


def test_responses_are_counted_by_route_and_class_of_status() -> None:
    async def test() -> None:
        async with serving() as server:
            for prompt in ("a", 1.5):
                await server.post(COMPLETIONS, {"prompt": prompt})
            await server.events(COMPLETIONS, {"prompt": "a"})
            for path in ("/v1/models", "/v1/none", "/v1/none/of/them", COMPLETIONS, "/health"):
                await server.get(path)
            _, text = await server.get("/metrics")
        counted = {
            tuple(line.split('"')[1::2]): float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("http_requests_total{")
        }
        assert counted == {
            (COMPLETIONS, "POST", "2xx"): 2, (COMPLETIONS, "POST", "4xx"): 1,
            ("/v1/models", "GET", "2xx"): 1, ("none", "GET", "4xx"): 3,
        }  # fmt: skip

    run(test())


def test_load_is_the_number_of_calls_in_progress() -> None:
    async def test() -> None:
        async with serving() as server:
            server.engine.go.clear()
            task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a"}))
            await until(lambda: server.engine.live)
            assert await server.get("/load") == (200, {"server_load": 1})
            server.engine.go.set()
            await task
            await server.quiet()
            assert await server.get("/load") == (200, {"server_load": 0})

    run(test())


@pytest.mark.parametrize(("wanted", "kind"), [("json", "JSON"), ("TEXT", "TEXT")])
def test_the_load_is_reported_to_who_asks(wanted: str, kind: str) -> None:
    async def test() -> None:
        async with serving() as server:
            headers = {"endpoint-load-metrics-format": wanted}
            body = {"messages": HELLO}
            async with server.session.post(
                server.url + CHAT, json=body, headers=headers
            ) as response:
                report = response.headers["endpoint-load-metrics"]
            async with server.session.post(server.url + CHAT, json=body) as response:
                assert "endpoint-load-metrics" not in response.headers
        assert report.startswith(kind)
        assert "kv_cache_usage_perc" in report and "num_requests_waiting" in report

    run(test())


def test_the_size_of_the_cache() -> None:
    async def test() -> None:
        async with serving() as server:
            _, text = await server.get("/metrics")
            pages = server.engine.stats().num_pages
            tokens = pages * server.engine.config.block_size
            assert f'kv_cache_size_tokens="{tokens}"' in text
            assert f'kv_cache_max_concurrency="{tokens / MAX_MODEL_LEN:.2f}"' in text
            assert "python_info{" in text

    run(test())
