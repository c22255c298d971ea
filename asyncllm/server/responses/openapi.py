"""The bodies, events and request fields of /v1/responses, as openapi.json describes them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from asyncllm.server.openapi.field_doc import FieldDoc, between, ignored, refused
from asyncllm.server.openapi.response_types import TokenLogprob
from asyncllm.server.responses.chat_request import MAX_METADATA
from asyncllm.server.responses.items import MAX_ITEMS

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[OutputText | InputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """Either `content` or `summary` holds what was thought."""

    id: str
    content: list[ReasoningText]
    summary: list[SummaryText]
    status: ItemStatus | UnsetType = UNSET


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Struct, tag_field="type", tag="function_call_output"):
    id: str
    status: ItemStatus
    call_id: str
    output: str | list[InputText]


OutputItem = MessageItem | ReasoningItem | FunctionCallItem
InputItem = MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem


class ResponseInputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class EffectiveReasoning(Struct):
    effort: str | None
    summary: str | None


class EffectiveText(Struct):
    format: dict[str, Any]
    verbosity: str


class ResponseBody(Struct):
    """The answer, and what it was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: EffectiveReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: EffectiveText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseDeleted(Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(Struct):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(Struct):
    """One event. `type` is its name; the other keys are those of OpenAI's event of that name."""

    type: str
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


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

_TOOLS = FieldDoc("Functions that the model may call.", type=list[ResponseTool] | None)
_TOOL_CHOICE = FieldDoc(
    "Whether it may call none, any (auto), must call one (required), or must call this one.",
    type=ResponseToolChoice | None,
)

RESPONSES_FIELD_DOCS: dict[str, FieldDoc] = {
    "input": FieldDoc(
        f"Text, or up to {MAX_ITEMS} items: message, function_call, function_call_output, "
        "reasoning, item_reference."
    ),
    "instructions": FieldDoc("The system prompt."),
    "previous_response_id": FieldDoc(
        "Go on with the conversation of a response that is kept here."
    ),
    "ResponsesRequest.tools": _TOOLS,
    "ResponsesRequest.tool_choice": _TOOL_CHOICE,
    "ResponsesRequest.parallel_tool_calls": FieldDoc("Whether one answer may make several calls."),
    "reasoning": FieldDoc("How much the model thinks, and how the answer shows it."),
    "ReasoningConfig.effort": FieldDoc("For chat templates that take it."),
    "ReasoningConfig.summary": FieldDoc(
        "Show the whole reasoning as the summary and not as content."
    ),
    "generate_summary": FieldDoc("An older name of summary."),
    "ReasoningConfig.context": FieldDoc("Which earlier thoughts stay is up to the chat template."),
    "ReasoningConfig.mode": FieldDoc("standard"),
    "background": FieldDoc(
        "Answer at once, and go on without the client: GET says how far it is; needs store."
    ),
    "text": FieldDoc("The form of the answer's text."),
    "TextConfig.format": FieldDoc("Free text, any JSON object, or JSON of a schema."),
    "TextConfig.verbosity": FieldDoc('Refused, except "medium".'),
    "SchemaFormat.name": FieldDoc("Of the schema; no part of the prompt."),
    "SchemaFormat.schema": FieldDoc("A JSON Schema."),
    "SchemaFormat.description": FieldDoc("Of the schema; no part of the prompt."),
    "SchemaFormat.strict": FieldDoc("The answer is held to the schema either way."),
    "truncation": FieldDoc("auto drops the oldest turns of a conversation that is too long."),
    "include": FieldDoc("message.output_text.logprobs reports log-probabilities."),
    "max_output_tokens": between(1, None, "Most tokens of the answer, thinking included."),
    "ResponsesRequest.metadata": FieldDoc(
        "Kept with the response.", schema={"maxProperties": MAX_METADATA}
    ),
    "ResponsesRequest.store": FieldDoc(
        "Whether the response is kept for later; it is unless false."
    ),
    "ResponsesRequest.top_logprobs": between(0, 20, "Report so many of the likeliest tokens too."),
    "ResponsesRequest.max_tokens": refused("Send max_output_tokens."),
    "ResponsesRequest.n": refused("Except 1."),
    "ResponsesRequest.response_format": refused("Send text.format."),
    "ResponsesRequest.prompt_logprobs": refused(),
    "ResponsesRequest.return_token_ids": refused(),
    "conversation": refused("Send previous_response_id."),
    "personality": refused(),
    "ResponsesRequest.prompt": refused("There are no stored prompts."),
    "access_programs": ignored(),
    "image": ignored(),
    "max_tool_calls": ignored("The server runs no tools."),
}
