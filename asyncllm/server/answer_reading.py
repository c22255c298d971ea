"""How a chat's answer is read: which parser its text goes through, if any.

A chat whose answer can be nothing but content has none, and takes the short way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncllm.formats import ModelFormat
from asyncllm.formats.events import AnswerParser, Event, ToolCallArguments, ToolCallBegin
from asyncllm.server.errors import bad_request
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import Service
from asyncllm.server.tool_use import ToolUse


@dataclass(slots=True, frozen=True)
class AnswerReading:
    """`keeps_special_tokens`: the parser needs them in the text."""

    new_parser: Callable[[], AnswerParser] | None = None
    keeps_special_tokens: bool = False


def answer_reading(
    request: ChatRequest, tools: ToolUse, prompt: str, service: Service
) -> AnswerReading:
    """Raises `ApiError` 400 for tools whose calls this model's format cannot tell."""
    format = service.answer_format
    if tools.choice.tools:
        _check_tools(tools, service)
    if format is None or not (tools.choice.tools or _always_parses(format)):
        return AnswerReading()
    known, callable, prefix = format, tools.choice.tools, _begun(request)

    def new_parser() -> AnswerParser:
        parser = known.parser(callable, prompt, prefix)
        return parser if tools.parallel else FirstCallOnly(parser)

    return AnswerReading(new_parser, format.keeps_special_tokens)


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


def _check_tools(tools: ToolUse, service: Service) -> None:
    param = tools.param
    if service.answer_format is None or not service.answer_format.reads_calls:
        raise bad_request(
            f"{param}: how this model writes tool calls is not known; start with "
            "--tool-call-parser, or send tool_choice 'none'",
            param,
        )
    if tools.choice.required:
        raise bad_request("tool_choice required is not supported", "tool_choice")
    if not service.args.enable_auto_tool_choice:
        raise bad_request(
            "tool_choice 'auto' is switched off: start with --enable-auto-tool-choice", param
        )
