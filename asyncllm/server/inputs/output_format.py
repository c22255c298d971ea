"""How a chat's output is parsed, and the grammar it must match.

`response_format`, `structured_outputs` and forced tool calls are one grammar of the output, after
its reasoning. Where tools may be called and content has a format, the output is either: calls, or
content of that format. A chat whose output can be nothing but content has no parser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from asyncllm.formats import ModelFormat
from asyncllm.formats.events import AnswerParser, Event, ToolCallArguments, ToolCallBegin
from asyncllm.formats.tools import ToolChoice
from asyncllm.server.http.errors import bad_request
from asyncllm.server.inputs.prompts import ToolUse, may_reason
from asyncllm.server.protocol import (
    ChatRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
)
from asyncllm.server.service import Service
from asyncllm.structured_outputs import ReasoningMarkers, StructuredOutputsParams

NO_FORM: Mapping[str, bool] = {}


def content_structure(
    request: GenerationRequest, json_form: Mapping[str, bool] = NO_FORM
) -> StructuredOutputsParams | None:
    """The structure that content must have. Raises `ApiError`, `InvalidRequestError`.

    json_form: `ServerArgs.json_form`.
    """
    structure = _asked_structure(request)
    if structure is None or (structure.json is None and not structure.json_object):
        return structure
    asked = request.structured_outputs
    is_open = {name: asked is None or getattr(asked, name) is None for name in json_form}
    if structure.whitespace_pattern is not None:
        is_open["disable_any_whitespace"] = False
    form: dict[str, Any] = {k: value for k, value in json_form.items() if is_open[k]}
    return replace(structure, **form) if form else structure


def _asked_structure(request: GenerationRequest) -> StructuredOutputsParams | None:
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
    json_form: Mapping[str, bool] = NO_FORM,
) -> StructuredOutputsParams | None:
    """`prefix`: the end of the prompt that belongs to the output already.

    may_reason: the output may begin with reasoning that the prompt has not opened.
    """
    content = content_structure(request, json_form)
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
        if format.format.channels is not None:
            after = None  # that grammar has the reasoning too
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
        return None  # content begins here, or has begun
    return ReasoningMarkers(marks.end, marks.begin)


@dataclass(slots=True, frozen=True)
class ChatOutput:
    """`keeps_special_tokens`: the parser needs them in the text."""

    new_parser: Callable[[], AnswerParser] | None = None
    keeps_special_tokens: bool = False
    structured_outputs: StructuredOutputsParams | None = None


def chat_output(request: ChatRequest, tools: ToolUse, prompt: str, service: Service) -> ChatOutput:
    """Raises `ApiError`, `InvalidRequestError`."""
    format, prefix = _format(tools, service), _output_prefix(request)
    reasons = format is not None and may_reason(request, service)
    form = service.args.json_form()
    structure = chat_structure(request, tools, format, prompt, prefix, reasons, form)
    callable = tools.choice.tools
    if format is None or not (callable or _always_parses(format)):
        return ChatOutput(structured_outputs=structure)

    def new_parser() -> AnswerParser:
        parser = format.parser(callable, prompt, prefix, tools.choice.only_these)
        return parser if tools.parallel else FirstCallOnly(parser)

    return ChatOutput(new_parser, format.keeps_special_tokens, structure)


class FirstCallOnly:
    """A parser for output that may make one call: drops the others."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Event]:
        return _first_call_only(self._parser.push(text))

    def close(self) -> list[Event]:
        return _first_call_only(self._parser.close())


def message_text(message: dict[str, Any]) -> str:
    """A message's content as one text, once the chat template has taken it."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(p if isinstance(p, str) else p.get("text", "") for p in content)
    return content or ""


def _first_call_only(events: list[Event]) -> list[Event]:
    return [
        event
        for event in events
        if not (isinstance(event, ToolCallBegin | ToolCallArguments) and event.index > 0)
    ]


def _always_parses(format: ModelFormat) -> bool:
    return format.reasoning is not None or format.format.channels is not None


def _output_prefix(request: ChatRequest) -> str:
    """The end of the prompt that belongs to the output already."""
    return message_text(request.messages[-1]) if request.continue_final_message else ""


def _format(tools: ToolUse, service: Service) -> ModelFormat | None:
    """The model's format. A forced call has a default format where the model has none."""
    format, param = service.answer_format, tools.param
    if not tools.choice.tools or (tools.choice.required and format and format.reads_calls):
        return format
    if tools.choice.required:
        return service.forced_format
    if format is None or not format.reads_calls:
        raise bad_request(
            f"{param}: how this model writes tool calls is not known; start with "
            "--tool-call-parser, or send tool_choice 'none' or 'required'",
            param,
        )
    if not service.args.enable_auto_tool_choice:
        raise bad_request(
            "tool_choice 'auto' is switched off: start with --enable-auto-tool-choice", param
        )
    return format
