"""The bodies and events of /v1/messages as types: what openapi.json says of them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

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
