"""The document's promises of a field hold: "ignored" changes nothing, "refused" is a 400."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncllm.server.args import ServerArgs
from asyncllm.server.openapi.document import Route
from asyncllm.server.openapi.fields import field_doc
from asyncllm.server.routes import ROUTES
from tests.server.http_harness import Server, run, serving

VALUES: list[Any] = [
    "x", 1, 3, True, 0.5, {"a": 1}, ["a"], [{"a": 1}], "right", {"type": "json_object"},
    {"json_object": True}, {"edits": ["a"]},
]  # fmt: skip
OF_ANOTHER_TYPE = re.compile(r"[\w.\[\]]+ (must be an? |must be one of |is not what )")
COUNTS_ONLY = {"/v1/responses/input_tokens"}  # takes what /v1/responses does, and makes no answer
PROMISES = [
    (route, name, doc.kind)
    for route in ROUTES
    if route.request is not None and route.is_served(ServerArgs())
    for name in route.request.__struct_fields__
    if (doc := field_doc(route.request, name)) is not None and doc.kind != "done"
    if doc.kind == "ignored" or route.path not in COUNTS_ONLY
]


def ids(value: Any) -> str:
    return value.path if isinstance(value, Route) else str(value)


async def ask(server: Server, route: Route, **fields: Any) -> tuple[int, Any, list[Any]]:
    """Status, body, and what the engine was asked."""
    server.engine.seen.clear()
    status, answer = await server.post(route.path, {**(route.example or {}), **fields})
    asked = [(one.params, one.token_ids, one.priority) for one in server.engine.seen]
    return status, answer, asked


def is_of_another_type(answer: Any) -> bool:
    return OF_ANOTHER_TYPE.match(answer["error"]["message"]) is not None


@pytest.mark.parametrize(("route", "name", "kind"), PROMISES, ids=ids)
def test_promise(route: Route, name: str, kind: str) -> None:
    async def test() -> None:
        async with serving() as server:
            _, _, wanted = await ask(server, route)
            told = []
            for value in VALUES:
                status, answer, asked = await ask(server, route, **{name: value})
                if status == 400 and is_of_another_type(answer):
                    continue
                told.append(status)
                if kind == "ignored":
                    assert (status, asked) == (200, wanted), (value, answer)
                elif status == 400:
                    assert name in json.dumps(answer) and not asked
            assert told, "no value had a type that the field takes"
            assert kind == "ignored" or 400 in told
            status, _, asked = await ask(server, route, **{name: None})
            assert (status, asked) == (200, wanted)

    run(test())
