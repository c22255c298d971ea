"""What the fields of /v1/responses mean, where they differ from the other APIs' of that name."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from asyncllm.server.note import Note, between, ignored, refused
from asyncllm.server.responses.chat_form import MAX_METADATA
from asyncllm.server.responses.items import MAX_ITEMS


class ResponseTool(Struct, tag_field="type", tag="function"):
    """`parameters` is a JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Struct, tag_field="type", tag="function"):
    name: str


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


ResponseToolChoice = Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions

_TOOLS = Note("Functions that the model may call.", type=list[ResponseTool] | None)
_TOOL_CHOICE = Note(
    "Whether it may call none, any (auto), must call one (required), or must call this one.",
    type=ResponseToolChoice | None,
)

RESPONSES_NOTES: dict[str, Note] = {
    "input": Note(
        f"Text, or up to {MAX_ITEMS} items: message, function_call, function_call_output, "
        "reasoning, item_reference."
    ),
    "instructions": Note("What the model is told before the conversation."),
    "previous_response_id": Note("Go on with the conversation of a response that is kept here."),
    "ResponsesRequest.tools": _TOOLS,
    "ResponsesRequest.tool_choice": _TOOL_CHOICE,
    "ResponsesRequest.parallel_tool_calls": Note("Whether one answer may make several calls."),
    "reasoning": Note("How much is thought, and how that is told."),
    "ReasoningConfig.effort": Note("For chat templates that take it."),
    "ReasoningConfig.summary": Note(
        "Tell what the model thought, whole, as the summary and not as content."
    ),
    "generate_summary": Note("An older name of summary."),
    "ReasoningConfig.context": Note("Which earlier thoughts stay is up to the chat template."),
    "ReasoningConfig.mode": Note("standard"),
    "text": Note("The form of the answer's text."),
    "TextConfig.format": Note("Free text, any JSON object, or JSON of a schema."),
    "TextConfig.verbosity": Note('Refused, except "medium".'),
    "SchemaFormat.name": Note("Of the schema; the model is not told."),
    "SchemaFormat.schema": Note("A JSON Schema."),
    "SchemaFormat.description": Note("Of the schema; the model is not told."),
    "SchemaFormat.strict": Note("The answer is held to the schema either way."),
    "truncation": Note("auto drops the oldest turns of a conversation that is too long."),
    "include": Note("message.output_text.logprobs reports log-probabilities."),
    "max_output_tokens": between(1, None, "Most tokens of the answer, thinking included."),
    "ResponsesRequest.metadata": Note(
        "Kept with the response.", schema={"maxProperties": MAX_METADATA}
    ),
    "ResponsesRequest.store": Note("Whether the response is kept for later; it is unless false."),
    "ResponsesRequest.top_logprobs": between(0, 20, "Report so many of the likeliest tokens too."),
    "ResponsesRequest.max_tokens": refused("Send max_output_tokens."),
    "ResponsesRequest.n": refused("Except 1."),
    "ResponsesRequest.response_format": refused("Send text.format."),
    "ResponsesRequest.prompt_logprobs": refused(),
    "ResponsesRequest.return_token_ids": refused(),
    "conversation": refused("Send previous_response_id."),
    "personality": refused(),
    "background": refused("Every response is waited for."),
    "ResponsesRequest.prompt": refused("There are no stored prompts."),
    "access_programs": ignored(),
    "image": ignored(),
    "max_tool_calls": ignored("The server runs no tools."),
}
