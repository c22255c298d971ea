"""Each field of Anthropic's request does something, cannot change the answer, or is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from asyncllm.server.http.errors import ApiError
from asyncllm.server.messages.chat_request import chat_request
from asyncllm.server.messages.protocol import CountTokensRequest, MessagesRequest
from tests.server.http_harness import HELLO, run, serving

HEADERS = {"betas"}
GOOD: dict[str, Any] = {"model": "fake", "max_tokens": 10, "messages": HELLO}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def fields_of(*params: Any) -> set[str]:
    return {name for one in params for name in one.__annotations__} - HEADERS


def test_no_field_of_the_client_is_unknown() -> None:
    create = fields_of(
        message_create_params.MessageCreateParamsBase,
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsBase,
        beta_create_params.ParseMessageCreateParamsBase,
    )
    assert len(create) > 20
    assert create <= set(MessagesRequest.__struct_fields__)
    count = fields_of(
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_params.MessageCountTokensParams,
    )
    assert count <= set(CountTokensRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**20}, "max_tokens"),
        ({"system": "x" * 5000}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0]"),
        ({"system": [{"type": "document"}]}, "system"),
        ({"system": 7}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"compaction": {"a": 1}}, "compaction"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management"),
        ({"fallbacks": ["x"]}, "fallbacks"),
        ({"thread": {"id": "x"}}, "thread"),
    ],
)  # fmt: skip
def test_bad_fields(fields: dict[str, Any], named: str) -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.post("/v1/messages", {**GOOD, **fields})
            assert status == 400, body
            assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
            assert set(body["error"]) - {"details"} == {"type", "message"}
            assert body["error"]["type"] == "invalid_request_error"
            assert named in body["error"]["message"]
            assert not server.engine.seen

    run(test())


def test_a_missing_field_is_named_once() -> None:
    async def test() -> None:
        async with serving() as server:
            without = {name: value for name, value in GOOD.items() if name != "max_tokens"}
            status, body = await server.post("/v1/messages", without)
        assert (status, body["error"]["message"]) == (400, "`max_tokens` is required")

    run(test())


def test_shape_of_what_never_reaches_the_route() -> None:
    async def test() -> None:
        async with serving(api_key=["key"]) as server:
            wanted = {
                "authentication_error": await server.post("/v1/messages", GOOD),
                "not_found_error": await server.post(
                    "/v1/messages/x", GOOD, **{"x-api-key": "key"}
                ),
                "invalid_request_error": await server.get("/v1/messages", **{"x-api-key": "key"}),
            }
            for kind, (status, body) in wanted.items():
                assert 400 < status < 500
                assert body["type"] == "error" and body["error"]["type"] == kind
            assert (await server.post("/v1/messages", GOOD, **{"x-api-key": "key"}))[0] == 200

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_closes(stream: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            server.service.draining = True
            status, body = await server.post("/v1/messages", {**GOOD, "stream": stream})
            assert (status, body["error"]["type"]) == (503, "overloaded_error")

    run(test())


def test_edits_that_edit_nothing_are_harmless() -> None:
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    body = {**GOOD, "context_management": {"edits": [edit]}}
    chat_request(msgspec.convert(body, MessagesRequest))
    edit["keep"] = "last"
    with pytest.raises(ApiError, match="context_management"):
        chat_request(msgspec.convert(body, MessagesRequest))
