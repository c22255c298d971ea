"""Blocks, tools and thinking in the chat request that they become."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncllm.sampling_params import SamplingParams
from asyncllm.server.inputs.call import Call
from asyncllm.server.messages.chat_request import chat_request
from asyncllm.server.messages.message import MessageView
from asyncllm.server.messages.protocol import MessagesRequest
from asyncllm.server.protocol import ChatRequest, JsonSchema, JsonSchemaFormat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(**fields: Any) -> ChatRequest:
    body = {"max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return chat_request(msgspec.convert(body, MessagesRequest))


def texts(*found: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in found]


def test_a_turn_with_calls_and_their_results() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Ask.", "signature": ""},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "b", "content": texts("no", "way"),
                 "is_error": True},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]  # fmt: skip
    assert chat(messages=messages).messages == [
        {"role": "user", "content": texts("Weather?")},
        {
            "role": "assistant",
            "content": texts("I ask."),
            "reasoning_content": "Ask.",
            "tool_calls": [
                {"id": "a", "type": "function",
                 "function": {"name": "f", "arguments": {"city": "Köln"}}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": texts("rain")},
        {"role": "tool", "tool_call_id": "b", "content": texts("Error:", "no", "way")},
        {"role": "user", "content": texts("And now?")},
    ]  # fmt: skip


def test_system_comes_first_and_once() -> None:
    messages = [{"role": "system", "content": "B"}, {"role": "user", "content": "Hi"}]
    found = chat(system="A", messages=messages).messages
    assert found[0] == {"role": "system", "content": texts("A", "B")}
    assert [message["role"] for message in found] == ["system", "user"]


def test_what_changes_with_each_request_does_not_lead_the_prompt() -> None:
    system = texts("x-anthropic-billing-header: cc_version=1; cch=123;", "You are a robot.")
    assert chat(system=system).messages[0]["content"] == texts("You are a robot.")
    assert chat(system=system[:1]).messages[0]["role"] == "user"


def test_a_last_word_of_the_assistant_is_gone_on_with() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "{"}]
    prefilled = chat(messages=messages)
    assert prefilled.continue_final_message and prefilled.add_generation_prompt is False
    assert chat().continue_final_message is None
    messages[1]["content"] = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    assert chat(messages=messages).continue_final_message is None


def test_tools() -> None:
    tool = {
        "name": "f",
        "description": "d",
        "input_schema": SCHEMA,
        "strict": True,
        "input_examples": [{"city": "Köln"}],
        "cache_control": {"type": "ephemeral"},
    }
    assert chat(tools=[tool, {"name": "g", "type": "custom", "input_schema": {}}]).tools == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {**SCHEMA, "examples": [{"city": "Köln"}]},
                "description": "d",
                "strict": True,
            },
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], wanted: Any) -> None:
    found = chat(tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (wanted, None)
    assert (
        chat(tool_choice={**choice, "disable_parallel_tool_use": True}).parallel_tool_calls is False
    )


def test_thinking_and_effort() -> None:
    enabled = chat(thinking={"type": "enabled", "budget_tokens": 2000})
    assert enabled.thinking_token_budget == 2000
    assert enabled.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    disabled = chat(thinking={"type": "disabled"}, chat_template_kwargs={"x": 1})
    assert disabled.chat_template_kwargs == {"enable_thinking": False, "thinking": False, "x": 1}
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs is None
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_schema_for_the_answer(where: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    fields = {"output_config": {"format": wanted}, "output_format": wanted}
    wanted_of_chat = JsonSchemaFormat(JsonSchema("output", schema=SCHEMA))
    assert chat(**{where: fields[where]}).response_format == wanted_of_chat


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "wanted"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 2, ("end_turn", None)),  # a token that ends an answer
        ("stop", "###", ("stop_sequence", "###")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_why_it_stopped(finish_reason: str, stop_reason: Any, wanted: tuple[str, Any]) -> None:
    call = Call("msg_1", "fake", [], SamplingParams())
    found = MessageView(call, False, "max_tokens").stop(finish_reason, stop_reason)
    assert (found["stop_reason"], found["stop_sequence"]) == wanted
