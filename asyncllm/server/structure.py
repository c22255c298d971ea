"""What a request's answer is held to: `response_format`, `structured_outputs`, forced tool calls.

All three are one grammar of the answer, after its reasoning. Where tools may be called and content
has a format, the answer is either: calls, or content of that format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from asyncllm.formats import ModelFormat
from asyncllm.formats.tools import ToolChoice
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import (
    ChatRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
)
from asyncllm.server.tool_use import ToolUse
from asyncllm.structured_outputs import ReasoningMarkers, StructuredOutputsParams


def content_structure(request: GenerationRequest) -> StructuredOutputsParams | None:
    """What the request asks of content. Raises `ApiError`, `InvalidRequestError`."""
    of_format = _of_response_format(request)
    wanted = request.structured_outputs
    if wanted is None:
        return of_format
    if of_format is not None:
        raise bad_request(
            "structured_outputs and response_format exclude each other", "structured_outputs"
        )
    given = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    return StructuredOutputsParams(**{k: v for k, v in given.items() if v is not None})


def chat_structure(
    request: ChatRequest,
    tools: ToolUse,
    format: ModelFormat | None,
    prompt: str,
    prefix: str,
    may_reason: bool,
) -> StructuredOutputsParams | None:
    """`prefix`: what of the prompt is the answer's own beginning.

    may_reason: the answer may begin with reasoning that the prompt has not opened.
    """
    content = content_structure(request)
    if format is None:
        return content
    after = _reasoning_before(format, prompt, prefix, may_reason)
    choice = tools.choice
    if choice.required and request.structured_outputs is not None:
        raise bad_request(
            "structured_outputs and a required tool exclude each other", "structured_outputs"
        )
    if choice.tools and content is not None and not choice.required:
        calls = format.call_grammar(ToolChoice(choice.tools, required=True), tools.parallel)
        return replace(content, alternative=calls, after=after)
    calls = format.call_grammar(choice, tools.parallel) if choice.tools else None
    if calls is not None:
        after = None if format.grammar_reasons else after
        return StructuredOutputsParams(grammar=calls, after=after)
    return content and replace(content, after=after)


def _of_response_format(request: GenerationRequest) -> StructuredOutputsParams | None:
    match request.response_format:
        case JsonObjectFormat():
            return StructuredOutputsParams(json_object=True)
        case JsonSchemaFormat(json_schema):
            if json_schema.schema is None:
                return StructuredOutputsParams(json_object=True)
            return StructuredOutputsParams(json=json_schema.schema)
        case StructuralTagFormat() as tag:
            fields: dict[str, Any] = msgspec.to_builtins(tag)
            given = {name: value for name, value in fields.items() if value is not None}
            return StructuredOutputsParams(structural_tag=given)
    return None


def _reasoning_before(
    format: ModelFormat, prompt: str, prefix: str, may_reason: bool
) -> ReasoningMarkers | None:
    marks, channels = format.reasoning, format.format.channels
    if marks is None:
        return None
    if channels is not None:
        if prefix:
            return None  # the message is open
        header = channels.header(channels.final)
        return ReasoningMarkers(marks.end, marks.begin, channels.resumed, header)
    if format.is_reasoning_open(prompt, prefix):
        return ReasoningMarkers(marks.end)
    if prefix or not may_reason or prompt.rstrip().endswith(marks.end.strip()):
        return None  # the answer proper begins here, or has begun
    return ReasoningMarkers(marks.end, marks.begin)
