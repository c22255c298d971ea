"""How a chat's answer is read: which parser its text goes through, if any.

A chat whose answer can be nothing but content has none, and takes the short way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from asyncllm.formats.events import AnswerParser, Event, ToolCallArguments, ToolCallBegin
from asyncllm.server.errors import bad_request
from asyncllm.server.service import Service
from asyncllm.server.tool_use import ToolUse


@dataclass(slots=True, frozen=True)
class AnswerReading:
    new_parser: Callable[[], AnswerParser] | None = None
    keeps_special_tokens: bool = False


def answer_reading(tools: ToolUse, prompt: str, service: Service) -> AnswerReading:
    """Raises `ApiError` 400 for tools whose calls this model's format cannot tell."""
    format = service.answer_format
    if tools.choice != "none":
        _check_tools(tools, service)
    if format is None or not (format.reads_reasoning or tools.callable):
        return AnswerReading()
    new_parser = partial(format.parser, tools.callable, prompt)
    if tools.callable and not tools.parallel:
        return AnswerReading(lambda: FirstCallOnly(new_parser()), format.keeps_special_tokens)
    return AnswerReading(new_parser, format.keeps_special_tokens)


class FirstCallOnly:
    """For answers that may make one call: a parser without the others'."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Event]:
        return _first_call_only(self._parser.push(text))

    def close(self) -> list[Event]:
        return _first_call_only(self._parser.close())


def _first_call_only(events: list[Event]) -> list[Event]:
    return [
        event
        for event in events
        if not (isinstance(event, ToolCallBegin | ToolCallArguments) and event.index > 0)
    ]


def _check_tools(tools: ToolUse, service: Service) -> None:
    param = "functions" if tools.legacy else "tools"
    format = service.answer_format
    if format is None or not format.reads_calls:
        raise bad_request(
            f"{param}: how this model writes tool calls is not known; start with "
            "--tool-call-parser, or send tool_choice 'none'",
            param,
        )
    if tools.choice == "auto" and not service.args.enable_auto_tool_choice:
        raise bad_request(
            "tool_choice 'auto' is switched off: start with --enable-auto-tool-choice", param
        )
    if tools.choice == "required":
        raise bad_request("tool_choice required is not supported", "tool_choice")
