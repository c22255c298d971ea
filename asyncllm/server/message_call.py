"""A call for one answer in parts, and the two ways it runs: whole, or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncllm.formats.events import AnswerParser, Content, Event
from asyncllm.server.answer_events import ParsedAnswer
from asyncllm.server.answer_parts import PartsCollector
from asyncllm.server.call import Call
from asyncllm.server.chat_call import chat_call
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import Service

NewParser = Callable[[], AnswerParser]


class PlainText:
    """The parser of a format in which everything is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def close(self) -> list[Event]:
        return []


def message_call(request: ChatRequest, service: Service, call_id: str) -> tuple[Call, NewParser]:
    """The call and the parser of its answer. Raises `ApiError`, `InvalidRequestError`."""
    return replace(chat_call(request, service), id=call_id), PlainText


async def answer_parts(service: Service, call: Call, new_parser: NewParser) -> PartsCollector:
    """The whole answer. Raises the `ApiError` that ended it."""
    collector = PartsCollector()
    with service.generation(call, ParsedAnswer(call, new_parser, collector)) as generation:
        await generation.submit()
        await collector.wait()
    return collector
