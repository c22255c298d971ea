"""The bodies, events and request fields of /v1/messages, as openapi.json describes them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from asyncllm.server.openapi.field_doc import FieldDoc, between, ignored, refused

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str
    citations: None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


MessageBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """Input tokens that the prefix cache had are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageBody(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Struct):
    input_tokens: int


class AnthropicErrorCode(Struct):
    error_code: str


class AnthropicErrorDetail(Struct):
    type: str
    message: str
    details: AnthropicErrorCode | UnsetType = UNSET


class AnthropicError(Struct, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageBody


class Ping(Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: MessageBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
)


class InputSchemaTool(Struct):
    """`input_schema` is a JSON Schema of an object."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


_IGNORED = (
    "task_budget", "speed", "user_profile_id", "workspace_id", "billing_policy", "inference_geo",
    "diagnostics", "fallback_credit_token",
)  # fmt: skip

MESSAGES_FIELD_DOCS: dict[str, FieldDoc] = {
    "system": FieldDoc("The system prompt: text, or blocks of text."),
    "InputMessage.role": FieldDoc("Whose turn it is; system stays where it stands."),
    "InputMessage.content": FieldDoc(
        "Text, or blocks: text, tool_use, tool_result, thinking, redacted_thinking."
    ),
    "CountTokensRequest.messages": FieldDoc(
        "The conversation so far; an answer goes on with a last assistant's text.",
        schema={"minItems": 1},
    ),
    "MessagesRequest.messages": FieldDoc(
        "The conversation so far; the answer goes on with a last assistant's text.",
        schema={"minItems": 1},
    ),
    "MessagesRequest.max_tokens": between(1, None, "Most tokens of the answer."),
    "stop_sequences": FieldDoc("As stop: the answer ends before the first that occurs."),
    "CountTokensRequest.tools": FieldDoc(
        "Functions that the model may call.", type=list[InputSchemaTool] | None
    ),
    "CountTokensRequest.tool_choice": FieldDoc("Whether it may, must or must not call one."),
    "ToolUseChoice.type": FieldDoc("any: at least one; tool: the one that is named."),
    "ToolUseChoice.name": FieldDoc("Of the tool that must be called."),
    "disable_parallel_tool_use": FieldDoc("At most one call."),
    "thinking": FieldDoc("Whether the model thinks first, as its chat template lets it."),
    "ThinkingConfig.type": FieldDoc("adaptive leaves it to the model."),
    "budget_tokens": between(0, None, "Most tokens of thinking."),
    "display": FieldDoc("omitted: thinking blocks come without their text."),
    "output_config": FieldDoc("The form of the answer, and how much is thought about it."),
    "output_format": FieldDoc("An older name of output_config.format."),
    "effort": FieldDoc("For chat templates that take it, as reasoning_effort."),
    "OutputConfig.format": FieldDoc("The answer is JSON of this schema."),
    "JsonOutput.type": FieldDoc("json_schema"),
    "schema": FieldDoc("A JSON Schema."),
    "context_management": refused("Except edits that keep all."),
    "compaction": refused(),
    "mcp_servers": refused("Tools are the client's to run."),
    "container": refused(),
    "fallbacks": refused("There is one model."),
    "thread": refused("No conversation is held here."),
    "cache_control": ignored("Prefixes are cached by their tokens."),
    **dict.fromkeys(_IGNORED, ignored()),
}
