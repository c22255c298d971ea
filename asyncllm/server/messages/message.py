"""Anthropic's responses: a message, the events that stream one, and errors.

    message_start, ping, then for each block content_block_start, content_block_delta ...,
    content_block_stop, at last message_delta with the stop reason and usage, message_stop

The deltas of one block differ only in their text: all around it is rendered when the block begins.
Errors have the shape of Anthropic's API by their path, also those of a middleware (no key, no such
route), and every response has its id in the header `request-id`.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import orjson
from aiohttp import web

from asyncllm.formats.events import Event
from asyncllm.outputs import CompletionOutput, RequestOutput
from asyncllm.server.http.errors import ApiError, as_api_error
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import Call, Usage
from asyncllm.server.messages.openapi import StopReason
from asyncllm.server.outputs.parts import OutputPart, PartsCollector, PartsSink


class MessageView:
    """Renders one message. `cut_off`: the stop reason of a message that ended for its length."""

    def __init__(self, call: Call, hides_thinking: bool, cut_off: StopReason) -> None:
        self.hides_thinking = hides_thinking
        self.shows_cached = call.shows_cached
        self._call = call
        self._cut_off = cut_off

    def head(self) -> dict[str, Any]:
        """A message that has not begun."""
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def body(self, answer: PartsCollector) -> dict[str, Any]:
        return {
            **self.head(),
            "content": [_block(part, self.hides_thinking) for part in answer.parts],
            **self.stop(answer.finish_reason, answer.stop_reason),
            "usage": usage_fields(answer.usage),
        }

    def stop(self, finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
        if finish_reason == "stop" and isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        reasons = {"tool_calls": "tool_use", "length": self._cut_off}
        return {"stop_reason": reasons.get(finish_reason, "end_turn"), "stop_sequence": None}


def empty_block(part: OutputPart) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Tokens that the cache had are not input tokens here."""
    counts = usage.as_dict()
    cached = (counts["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _block(part: OutputPart, hides_thinking: bool) -> dict[str, Any]:
    block = empty_block(part)
    match part.kind:
        case "text":
            block["text"] = part.text
        case "reasoning":
            block["thinking"] = "" if hides_thinking else part.text
        case "call":
            block["input"] = _arguments(part.text)
    return block


def _arguments(text: str) -> Any:
    """A call that was cut off has no whole JSON: then there are none."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTAS = {
    "text": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "call": b'{"type":"input_json_delta","partial_json":',
}


class MessageStream(PartsSink):
    """An `EventSink` that writes to one SSE stream: one write per engine step."""

    def __init__(self, sse: SSEStream, view: MessageView, request_id: str) -> None:
        super().__init__()
        self._sse = sse
        self._view = view
        self._request_id = request_id
        self._frames: list[bytes] = []  # of this step
        self._before_text = b""
        self._stop: dict[str, Any] = {}

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        usage = Usage(self._view.shows_cached)
        usage.count(0, output)
        start = {**self._view.head(), "usage": {**usage_fields(usage), "output_tokens": 0}}
        self._frames += [_event("message_start", {"message": start}), PING]

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        self.take(events)
        if self._frames:
            self._sse.push(b"".join(self._frames))
            self._frames.clear()

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self.end_parts(finish_reason)
        self._stop = self._view.stop(finish_reason, stop_reason)

    def finish(self, usage: Usage) -> None:
        fields = {"delta": self._stop, "usage": usage_fields(usage)}
        self._frames += [_event("message_delta", fields), _event("message_stop", {})]
        self._sse.end(b"".join(self._frames))

    def fail(self, error: ApiError) -> None:
        body = error_body(error, self._request_id)
        self._sse.end(b"event: error\ndata: " + body + b"\n\n")

    def add_text(self, part: OutputPart, text: str) -> None:
        if self._before_text:
            self._frames.append(self._before_text + orjson.dumps(text) + b"}}\n\n")

    def open_part(self, part: OutputPart) -> None:
        fields = {"index": part.index, "content_block": empty_block(part)}
        self._frames.append(_event("content_block_start", fields))
        self._before_text = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":%b'
            % (part.index, _DELTAS[part.kind])
        )
        if part.kind == "reasoning" and self._view.hides_thinking:
            self._before_text = b""

    def close_part(self, part: OutputPart, is_cut_off: bool) -> None:
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            fields = {"index": part.index, "delta": delta}
            self._frames.append(_event("content_block_delta", fields))
        self._frames.append(_event("content_block_stop", {"index": part.index}))


def _event(name: str, fields: dict[str, Any]) -> bytes:
    body = orjson.dumps({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


PREFIX = "/v1/messages"

REQUEST_ID_HEADER = "request-id"
# Anthropic's tool runner tries to have the server hold the conversation; this code stops that.
THREAD_UNSUPPORTED = "thread_unsupported_request"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def error_body(error: ApiError, name: str) -> bytes:
    """There is no `param` here, so the message begins with it."""
    message = error.message
    if error.param is not None and re.match(rf"`?{re.escape(error.param)}\b", message) is None:
        message = f"{error.param}: {message}"
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    detail: dict[str, Any] = {"type": kind, "message": message}
    if error.code == THREAD_UNSUPPORTED:
        detail["details"] = {"error_code": THREAD_UNSUPPORTED}
    return orjson.dumps({"type": "error", "error": detail, "request_id": name})


def error_response(error: Exception) -> web.Response:
    known, name = as_api_error(error), new_request_id()
    known.headers[REQUEST_ID_HEADER] = name
    return known.response(error_body(known, name))
