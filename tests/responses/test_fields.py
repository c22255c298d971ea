"""Each field of OpenAI's request does something, cannot change the answer, or is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_includable,
)

from asyncllm.server.responses.chat_request import INCLUDABLE
from asyncllm.server.responses.protocol import ResponsesRequest
from tests.server.http_harness import run, serving

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_no_field_of_the_client_is_unknown() -> None:
    asked = {
        name
        for params in (
            response_create_params.ResponseCreateParamsBase,
            response_create_params.ResponseCreateParamsStreaming,
            input_token_count_params.InputTokenCountParams,
        )
        for name in params.__annotations__
    }
    assert len(asked) > 25
    assert asked <= set(ResponsesRequest.__struct_fields__)
    assert set(get_args(response_includable.ResponseIncludable)) == INCLUDABLE


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": 7}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 3000}, "input"),
        ({"instructions": 7}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning"),
        ({"reasoning": {"summary": "concise"}}, "reasoning"),
        ({"reasoning": {"mode": "pro"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"user": 7}, "user"),
    ],
)
def test_bad_fields(fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            status, body = await server.post("/v1/responses", {"input": "Hi", **fields})
            assert status == 400, body
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert body["error"]["param"] == param
            assert not server.engine.seen

    run(test())


def test_a_conversation_over_the_limit_of_a_body_is_refused() -> None:
    async def test() -> None:
        async with serving(max_body_bytes=9_000) as server:
            name = None
            for _ in range(8):
                body = {"input": "x" * 1000, "previous_response_id": name, "max_output_tokens": 5}
                status, answer = await server.post("/v1/responses", body)
                if status != 200:
                    break
                name = answer["id"]
            assert status == 400
            assert answer["error"]["param"] == "previous_response_id"
            assert "9000" in answer["error"]["message"]

    run(test())


def test_an_item_that_is_not_there() -> None:
    async def test() -> None:
        async with serving() as server:
            body = {"input": [{"type": "item_reference", "id": "msg_1_2"}]}
            status, answer = await server.post("/v1/responses", body)
            assert (status, answer["error"]["param"]) == (404, "input")

    run(test())


def test_pages_of_input_items() -> None:
    async def test() -> None:
        async with serving() as server:
            items = [{"role": "user", "content": str(number)} for number in range(5)]
            _, answer = await server.post("/v1/responses", {"input": items})
            path = f"/v1/responses/{answer['id']}/input_items"
            _, page = await server.get(f"{path}?order=asc&limit=2")
            assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"]
            assert page["has_more"] is True
            _, page = await server.get(f"{path}?order=asc&limit=100&after={page['last_id']}")
            assert [item["content"][0]["text"] for item in page["data"]] == ["2", "3", "4"]
            assert page["has_more"] is False
            for bad in ("limit=0", "limit=101", "limit=x", "limit=1e1", "after=x"):
                assert (await server.get(f"{path}?{bad}"))[0] == 400
            assert (await server.get(f"/v1/responses/{answer['id']}?stream=true"))[0] == 400

    run(test())
