"""The server's surface over two engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm import AsyncLLMEngine
from tests.engine.adapter_files import write_tiny_adapter
from tests.server.http_harness import CHAT, COMPLETIONS, Server, run, serving
from tests.server.process import MODEL
from tests.waiting import until

ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": 200,
    "swap_space": 0,
    "max_model_len": 512,
    "device": "cpu",
    "enable_lora": True,
}
CACHED = ("prompt_tokens_details", "input_tokens_details", "input_tokens",
          "cache_read_input_tokens")  # depend on what was asked before  # fmt: skip
QUESTIONS = [[{"role": "user", "content": f"What is {i} + 30?"}] for i in range(6)]
GREEDY = {"max_tokens": 5, "temperature": 0}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {"messages": q, "temperature": 0, "max_tokens": 12}) for q in QUESTIONS),
    (COMPLETIONS, {"prompt": ["Once", "upon"], "temperature": 0, "max_tokens": 8, "n": 2}),
    (COMPLETIONS, {"prompt": "Once", "temperature": 0, "max_tokens": 3, "logprobs": 2}),
    (CHAT, {"messages": QUESTIONS[0], "max_tokens": 30, "temperature": 0, "response_format": {
        "type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["a", "b"]}}}}),
    ("/v1/responses", {"input": "Hello", "temperature": 0, "max_output_tokens": 8}),
    ("/v1/messages", {"messages": QUESTIONS[0], "temperature": 0, "max_tokens": 8}),
    ("/inference/v1/generate", {"token_ids": [72, 101], "sampling_params": GREEDY}),
    (CHAT, {"messages": QUESTIONS[0], "max_tokens": 100_000}),
    (CHAT, {"messages": QUESTIONS[0], "response_format": {
        "type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "no"}}}}),
    (COMPLETIONS, {"prompt": [1 << 29]}),
    (COMPLETIONS, {"prompt": "word " * 3000}),
    (COMPLETIONS, {"prompt": "Once", "model": "no such"}),
]  # fmt: skip


async def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    status, answer = await server.post(path, {"model": MODEL, "seed": 3, **body})
    return status, without_names(answer)


def without_names(answer: Any) -> Any:
    """An answer but for its ids, its times and what is below 1e-3."""
    if isinstance(answer, dict):
        named = ("id", "created", "created_at", "completed_at", "request_id", *CACHED)
        return {k: without_names(v) for k, v in answer.items() if k not in named}
    if isinstance(answer, list):
        return [*map(without_names, answer)]
    # The batch shows in a log-probability's last digits.
    return round(answer, 3) if isinstance(answer, float) else answer


def samples(text: str, name: str) -> dict[str, float]:
    """Its values by engine."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"asyncllm:{name}"
    }


async def check_surface(engine: Any, adapter: Path) -> None:
    """Answers are one engine's; aborts, adapters, models, metrics and health are of all."""
    one: Any = AsyncLLMEngine(MODEL, **ENGINE)
    async with serving(one) as server:
        expected = [await ask(server, *request) for request in REQUESTS]
    args = {"allow_runtime_lora_updating": True, "lora_root": [str(adapter.parent)]}
    async with serving(engine, **args) as server:
        found = await asyncio.gather(*(ask(server, *request) for request in REQUESTS))
        for request, answer, right in zip(REQUESTS, found, expected, strict=True):
            assert answer == right, request
        await _check_adapters(server, adapter)
        await _check_background(server)
        status, text = await server.get("/metrics")
        assert status == 200
        tokens = samples(text, "generation_tokens_total")
        assert set(tokens) == {"0", "1"} and min(tokens.values()) > 0
        assert samples(text, "engine_up") == {"0": 1, "1": 1}
        assert set(samples(text, "time_to_first_token_seconds_count")) == {"0", "1"}
        async with server.session.get(server.url + "/health") as response:
            assert response.status == 200
        await _check_disconnect(server, engine)
        await until(lambda: not server.service.num_live and not engine.stats().num_running)
        engine.check_integrity()
        engine.check_idle()


async def _check_adapters(server: Server, adapter: Path) -> None:
    named = {"lora_name": "it", "lora_path": str(adapter)}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        async with server.session.post(server.url + path, json=named) as response:
            assert response.status == 200, await response.text()
        _, models = await server.get("/v1/models")
        is_loaded = "un" not in path
        assert [card["id"] for card in models["data"]] == [MODEL, *["it"] * is_loaded]
        for i in range(4):  # on whichever engine
            body = {"prompt": f"Once {i}", "model": "it", "max_tokens": 4}
            status, _ = await server.post(COMPLETIONS, body)
            assert status == (200 if is_loaded else 404)


async def _check_background(server: Server) -> None:
    body = {"model": MODEL, "input": "Hello", "background": True, "max_output_tokens": 8}
    status, begun = await server.post("/v1/responses", body)
    assert status == 200
    async with asyncio.timeout(60):
        while True:
            _, response = await server.get(f"/v1/responses/{begun['id']}")
            if response["status"] in ("completed", "incomplete"):
                return
            await asyncio.sleep(0.01)


async def _check_disconnect(server: Server, engine: Any) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    responses = [await server.session.post(server.url + COMPLETIONS, json=body) for _ in range(4)]
    for response in responses:
        await response.content.readline()
        response.close()
    await until(lambda: engine.stats().num_running == 0)
    assert engine.stats().num_used_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["uni", pytest.param("mp", marks=pytest.mark.slow)])
def test_the_surface(backend: str, tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "it", 1)
    engine = AsyncLLMEngine(MODEL, **ENGINE, data_parallel_size=2, data_parallel_backend=backend)
    run(check_surface(engine, adapter))
