"""How a chat's answer is read, and what it is held to: its parser, if any, and its grammar.

A chat whose answer can be nothing but content has no parser, and takes the short way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncllm.formats import ModelFormat
from asyncllm.formats.events import AnswerParser, Event, ToolCallArguments, ToolCallBegin
from asyncllm.server.errors import bad_request
from asyncllm.server.prompts import may_reason
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import Service
from asyncllm.server.structure import chat_structure
from asyncllm.server.tool_use import ToolUse
from asyncllm.structured_outputs import StructuredOutputsParams


@dataclass(slots=True, frozen=True)
class AnswerReading:
    """`keeps_special_tokens`: the parser needs them in the text."""

    new_parser: Callable[[], AnswerParser] | None = None
    keeps_special_tokens: bool = False
    structured_outputs: StructuredOutputsParams | None = None


def answer_reading(
    request: ChatRequest, tools: ToolUse, prompt: str, service: Service
) -> AnswerReading:
    """Raises `ApiError`, `InvalidRequestError`."""
    format, prefix = _format(tools, service), _begun(request)
    reasons = format is not None and may_reason(request, service)
    structure = chat_structure(request, tools, format, prompt, prefix, reasons)
    callable = tools.choice.tools
    if format is None or not (callable or _always_parses(format)):
        return AnswerReading(structured_outputs=structure)

    def new_parser() -> AnswerParser:
        parser = format.parser(callable, prompt, prefix)
        return parser if tools.parallel else FirstCallOnly(parser)

    return AnswerReading(new_parser, format.keeps_special_tokens, structure)


class FirstCallOnly:
    """For answers that may make one call: a parser without the others'."""

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


def _begun(request: ChatRequest) -> str:
    """What of the prompt is the answer's own beginning."""
    return message_text(request.messages[-1]) if request.continue_final_message else ""


def _format(tools: ToolUse, service: Service) -> ModelFormat | None:
    """Where a call is forced, any model can write it: in a format of ours, if it has none."""
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
