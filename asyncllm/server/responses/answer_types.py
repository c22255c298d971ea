"""The bodies and events of /v1/responses as types: what openapi.json says of them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from asyncllm.server.answers import TokenLogprob

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
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    model: str
    background: Literal[False]
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
