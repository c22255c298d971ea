"""Answers are what openapi.json says, field by field: nothing undocumented, nothing missing."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest

from asyncllm.server.openapi.document import openapi
from asyncllm.server.routes import ROUTES
from tests.server.http_harness import CHAT, COMPLETIONS, HELLO, Server, run, serving
from tests.server.scripted import NAMES, PARAMETERS, script

BATCH = "/v1/chat/completions/batch"
GENERATE = "/inference/v1/generate"
DOCUMENT = openapi(ROUTES, needs_key=False)


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with every object closed that lists its fields and says nothing of others."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


STRICT = strict(DOCUMENT)


def check(method: str, path: str, status: int, body: Any) -> None:
    answer = STRICT["paths"][path][method.lower()]["responses"][str(status)]
    check_schema(answer["content"]["application/json"]["schema"], body)


def check_schema(schema: dict[str, Any], body: Any) -> None:
    whole = {**schema, "components": STRICT["components"]}
    jsonschema.Draft202012Validator(whole).validate(body)


def check_event(path: str, event: Any) -> None:
    content = STRICT["paths"][path]["post"]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    if event != "[DONE]":
        check_schema(data["anyOf"][1]["contentSchema"], event)


# What is asked, beside the route's own example.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO}),
    (CHAT, {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HELLO, "prompt_logprobs": 1, "max_tokens": 3}),
    (CHAT, {"messages": HELLO, "return_token_ids": True, "max_tokens": 3}),
    (BATCH, {"messages": [HELLO, HELLO], "logprobs": True, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "Hi"}),
    (COMPLETIONS, {"prompt": "Hi", "return_token_ids": True, "echo": True}),
    (COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3}),
    (COMPLETIONS, {"prompt": [72, 73], "prompt_logprobs": 1, "echo": True}),
    (GENERATE, {"token_ids": [72], "sampling_params": {"n": 2, "logprobs": 1}}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/tokenize", {"messages": HELLO, "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 105]}),
]
REFUSED: list[tuple[str, Any, int]] = [
    (CHAT, {"messages": HELLO, "temperature": -1}, 400),
    (CHAT, {"messages": []}, 400),
    (COMPLETIONS, {"prompt": "Hi", "model": "another"}, 404),
    ("/tokenize", {}, 400),
    ("/detokenize", {"tokens": [10**9]}, 400),
]


def test_whole_answers() -> None:
    async def test() -> None:
        async with serving() as server:
            for path, body in BODIES:
                status, answer = await server.post(path, body)
                assert status == 200, answer
                check("POST", path, 200, answer)
            for path, body, wanted in REFUSED:
                status, answer = await server.post(path, body)
                assert status == wanted
                check("POST", path, status, answer)

    run(test())


def test_examples_are_answered() -> None:
    async def test() -> None:
        async with serving() as server:
            for route in ROUTES:
                if route.request is not None:
                    assert route.example is not None, route.path
                if route.request is not None and route.is_served(server.service.args):
                    status, answer = await server.post(route.path, route.example)
                    assert status == 200, answer
                    check("POST", route.path, 200, answer)

    run(test())


def test_what_needs_no_body() -> None:
    async def test() -> None:
        async with serving() as server:
            for path in ("/v1/models", "/version", "/load", "/openapi.json"):
                status, answer = await server.get(path)
                check("GET", path, status, answer)
            _, answer = await server.get("/v1/models/fake")
            check("GET", "/v1/models/{model}", 200, answer)
            status, answer = await server.get("/v1/models/other")
            check("GET", "/v1/models/{model}", status, answer)

    run(test())


async def check_stream(server: Server, path: str, body: dict[str, Any]) -> None:
    events = await server.events(path, body)
    assert len(events) > 2
    for event in events:
        check_event(path, event)


@pytest.mark.parametrize(
    "options",
    [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
)
def test_streams(options: dict[str, Any] | None) -> None:
    async def test() -> None:
        async with serving() as server:
            for path, body in BODIES:
                content = STRICT["paths"][path]["post"]["responses"]["200"]["content"]
                if "text/event-stream" in content and "prompt_logprobs" not in body:
                    await check_stream(server, path, {**body, "stream_options": options})
            await check_stream(server, CHAT, {"messages": [{"role": "user", "content": "<fail>"}]})

    run(test())


def test_reasoning_and_calls() -> None:
    """Whole and streamed, as tools and as the older functions."""
    function = {"name": "weather", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": {**function, "name": name}} for name in NAMES]

    async def test() -> None:
        async with serving() as server:
            script(server.engine)
            for more in ({"tools": tools}, {"functions": [function]}, {"include_reasoning": False}):
                body = {"messages": HELLO, **more}
                status, answer = await server.post(CHAT, body)
                assert status == 200, answer
                check("POST", CHAT, 200, answer)
                await check_stream(server, CHAT, {**body, "logprobs": True})
                await check_stream(server, CHAT, {**body, "return_token_ids": True})

    run(test())


def test_the_check_sees_what_is_wrong() -> None:
    good = {"version": "1"}
    check("GET", "/version", 200, good)
    for bad in ({}, {"version": 1}, {**good, "more": 1}, json.dumps(good)):
        with pytest.raises(jsonschema.ValidationError):
            check("GET", "/version", 200, bad)
