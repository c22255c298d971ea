"""The streamed message: events of an answer in, Anthropic's events out.

    message_start, ping, then for each block content_block_start, content_block_delta ...,
    content_block_stop, at last message_delta with the stop reason and usage, message_stop

The deltas of one block differ only in their text: all around it is rendered when the block begins.
"""

from __future__ import annotations

from typing import Any

import orjson

from asyncllm.formats.events import Event
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.server.answer_parts import AnswerPart, AnswerParts, News
from asyncllm.server.errors import ApiError
from asyncllm.server.messages.answer import MessageView, empty_block, usage_fields
from asyncllm.server.messages.errors import error_body
from asyncllm.server.sse import SSEStream
from asyncllm.server.usage import Usage

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTAS = {
    "text": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "call": b'{"type":"input_json_delta","partial_json":',
}


class StreamedMessage:
    """An `AnswerSink` that writes to one SSE stream: one write per engine step."""

    def __init__(self, sse: SSEStream, view: MessageView, request_id: str) -> None:
        self._sse = sse
        self._view = view
        self._request_id = request_id
        self._parts = AnswerParts()
        self._frames: list[bytes] = []  # of this step
        self._before_text = b""
        self._stop: dict[str, Any] = {}

    def opened(self, choice: int, output: RequestOutput) -> None:
        usage = Usage(self._view.shows_cached)
        usage.count(0, output)
        start = {**self._view.head(), "usage": {**usage_fields(usage), "output_tokens": 0}}
        self._frames += [_event("message_start", {"message": start}), PING]

    def said(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        for event in events:
            if isinstance(event, self._parts.goes_on):
                self._add_text(event.text)
            else:
                self._tell(self._parts.add(event))
        if self._frames:
            self._sse.push(b"".join(self._frames))
            self._frames.clear()

    def ended(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self._tell(self._parts.flush())
        if self._parts.open is not None:
            self._close(self._parts.open)
        self._stop = self._view.stop(finish_reason, stop_reason)

    def finish(self, usage: Usage) -> None:
        fields = {"delta": self._stop, "usage": usage_fields(usage)}
        self._frames += [_event("message_delta", fields), _event("message_stop", {})]
        self._sse.end(b"".join(self._frames))

    def fail(self, error: ApiError) -> None:
        body = error_body(error, self._request_id)
        self._sse.end(b"event: error\ndata: " + body + b"\n\n")

    def _tell(self, news: News) -> None:
        if news.closed is not None:
            self._close(news.closed)
        if news.opened is not None:
            self._open(news.opened)
        self._add_text(news.text)

    def _add_text(self, text: str) -> None:
        if text and self._before_text:
            self._frames.append(self._before_text + orjson.dumps(text) + b"}}\n\n")

    def _open(self, part: AnswerPart) -> None:
        fields = {"index": part.index, "content_block": empty_block(part)}
        self._frames.append(_event("content_block_start", fields))
        self._before_text = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":%b'
            % (part.index, _DELTAS[part.kind])
        )
        if part.kind == "reasoning" and self._view.hides_thinking:
            self._before_text = b""

    def _close(self, part: AnswerPart) -> None:
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            fields = {"index": part.index, "delta": delta}
            self._frames.append(_event("content_block_delta", fields))
        self._frames.append(_event("content_block_stop", {"index": part.index}))


def _event(name: str, fields: dict[str, Any]) -> bytes:
    body = orjson.dumps({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
