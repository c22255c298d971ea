"""Any value in any field: a 200 or a 4xx with the four keys, and nothing left over."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine
from asyncllm.server import routes
from asyncllm.server.inference import SamplingFields
from asyncllm.server.messages.openapi import AnthropicError
from asyncllm.server.openapi.document import Route
from tests.server.http_harness import Server, run, serving, until

NUM_BODIES = 120  # per route
AT_ONCE = 16
NESTED: Any = None
for _ in range(60):
    NESTED = [NESTED]

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 17, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30,
    0.0, -0.0, 0.5, 1e308, -1e-320, "", "a", "\x00", "\ud800", "é" * 3000, "</s>", "{{ 1/0 }}",
    "<|im_end|>", [], [[]], [1, "a", None], [2**40], [-1], ["a"] * 300, {}, {"a": 1},
    {"1": 1e308}, {"type": "json_object"}, {"type": "image_url", "image_url": {"url": "file:///"}},
    {"include_usage": True}, NESTED, [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    [{"role": "tool", "content": None, "tool_calls": [{}]}], [{"role": {}, "content": 1}],
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "", "schema": {"$ref": "file:///"}}},
    {"type": "structural_tag", "format": NESTED}, {"type": "structural_tag", "triggers": []},
    {"json": {"type": ["object", 7]}}, {"json": "{"}, {"regex": "(a|aa)+$"}, {"regex": "\\"},
    {"choice": ["", "a"]}, {"grammar": "start: start"}, {"grammar": "root ::= root"},
    "required", "auto", "none", {"type": "function", "function": {"name": "f"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NESTED]}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
    [{"type": "custom", "custom": {}}], [{"name": "f"}], {"name": "f"}, "high", "openai",
]  # fmt: skip
ROUTES = [route for route in routes.ROUTES if route.request is not None]

ANTHROPIC = {route.path for route in ROUTES if route.error is AnthropicError}


def hostile_body(rng: random.Random, route: Route) -> bytes:
    """A good body with up to four fields replaced; sometimes cut off or with bytes changed."""
    assert route.request is not None and route.example is not None
    fields = rng.choices(route.request.__struct_fields__, k=rng.choice((1, 1, 2, 4)))
    body = route.example | {field: hostile_value(rng, field) for field in fields}
    raw = json.dumps(body).encode()  # writes a lone surrogate as \ud800
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw))]
    if rng.random() < 0.1:
        place = rng.randrange(len(raw) + 1)
        raw = raw[:place] + rng.randbytes(3) + raw[place:]
    return raw


def hostile_value(rng: random.Random, field: str) -> Any:
    value = rng.choice(VALUES)
    if field == "sampling_params" and rng.random() < 0.9:
        return {rng.choice(SamplingFields.__struct_fields__): value}
    return value


async def check_one(server: Server, path: str, raw: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    async with server.session.post(server.url + path, data=raw, headers=headers) as response:
        answer = await response.read()
    assert response.status == 200 or 400 <= response.status < 500, (path, raw[:500], answer)
    if response.status != 200:
        error = json.loads(answer)["error"]
        keys = {"message", "type"} if path in ANTHROPIC else {"message", "type", "param", "code"}
        assert set(error) - {"details"} == keys, (path, raw[:500], answer)
        assert len(error["message"]) <= 2000
        assert "Traceback" not in error["message"] and "/asyncllm/" not in error["message"]
    return response.status


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_field_value_makes_a_500_or_leaves_anything(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        engine = AsyncLLMEngine("tiny", max_model_len=96, max_num_seqs=8)
        async with serving(engine) as server:
            await check_one(server, "/tokenize", b'{"prompt": "warm"}')
            num_tasks, num_files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
            room = asyncio.Semaphore(AT_ONCE)

            async def one(path: str, raw: bytes) -> int:
                async with room:
                    return await check_one(server, path, raw)

            calls = [
                one(route.path, hostile_body(rng, route))
                for route in ROUTES
                for _ in range(NUM_BODIES)
            ]
            statuses = await asyncio.gather(*calls)
            assert statuses.count(200) > 50 and statuses.count(400) > 100  # both kinds occur
            await server.session.close()
            await until(
                lambda: (
                    server.service.num_live == engine.stats().num_running == 0
                    and len(asyncio.all_tasks()) <= num_tasks
                    and len(os.listdir("/proc/self/fd")) <= num_files
                )
            )
            engine.check_idle()
            assert engine.stats().num_used_pages == 0

    run(test())
