"""The streamed response: events of a message in, OpenAI's response events out.

    response.created, (response.queued,) response.in_progress
    for each item   response.output_item.added, content_part.added,
                    output_text.delta (reasoning_text, function_call_arguments) ..., .done,
                    content_part.done, output_item.done
    at last         response.completed, or .incomplete, or .failed

A call has no content part; reasoning that is reported as a summary has a summary part. The deltas
of one item differ only in text and number: all around it is rendered when the item begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from asyncllm.formats.events import Event
from asyncllm.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.sse import SSEStream
from asyncllm.server.inputs.call import Usage
from asyncllm.server.outputs.parts import OutputPart, PartsSink
from asyncllm.server.responses.background import EventLog
from asyncllm.server.responses.view import ResponseView


class ResponseStream(PartsSink):
    """An `EventSink` that writes to one SSE stream: one write per engine step.

    `keep` is called with the response once it is whole, before its last event is sent.
    """

    def __init__(
        self,
        sse: SSEStream | EventLog,
        view: ResponseView,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._sse = sse
        self._view = view
        self._keep = keep
        self.parts: list[OutputPart] = []  # that have been opened
        self._output: list[dict[str, Any]] = []
        self._frames: list[bytes] = []  # of this step
        self._sequence_number = 0
        self._before_text = b""
        self._logprobs: SampleLogprobs = []  # of tokens whose text has not come yet
        self._finish_reason = ""
        first = "queued" if view.is_background else "in_progress"
        self._event("response.created", {"response": view.body(first, [])})
        if view.is_background:
            self._event("response.queued", {"response": view.body(first, [])})
        self._event("response.in_progress", {"response": view.body("in_progress", [])})
        self._push()

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        pass

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        if completion is not None and completion.logprobs:
            self._logprobs += completion.logprobs
        self.take(events)
        self._push()

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self.end_parts(finish_reason)
        self._finish_reason = finish_reason

    def finish(self, usage: Usage) -> None:
        response = self._view.ended(self._finish_reason, self._output, usage)
        self._keep(response)
        self._event(f"response.{response['status']}", {"response": response})
        self._sse.end(b"".join(self._frames))

    def fail(self, error: ApiError) -> None:
        self._event("response.failed", {"response": self._view.failed(error, self._output)})
        self._sse.end(b"".join(self._frames))

    def add_text(self, part: OutputPart, text: str) -> None:
        part.pieces.append(text)
        end = b""
        if self._logprobs:
            if part.kind == "text":
                end = b',"logprobs":' + orjson.dumps(self._view.logprobs(self._logprobs))
                part.logprobs += self._logprobs
            self._logprobs = []
        self._frames.append(
            b'%b%b%b,"sequence_number":%d}\n\n'
            % (self._before_text, orjson.dumps(text), end, self._sequence_number)
        )
        self._sequence_number += 1

    def open_part(self, part: OutputPart) -> None:
        self.parts.append(part)
        item = self._view.empty_item(part)
        self._event("response.output_item.added", {"output_index": part.index, "item": item})
        kind, place = self._place(part)
        if part.kind != "call":
            empty = OutputPart(part.index, part.kind)
            self._event(f"{self._part_kind(part)}.added", {**place, "part": self._part(empty)})
        if part.kind == "text" and not self._view.shows_logprobs:
            place["logprobs"] = []
        head = orjson.dumps({"type": f"{kind}.delta", **place})
        name = f"{kind}.delta".encode()
        self._before_text = b'event: %b\ndata: %b,"delta":' % (name, head[:-1])

    def close_part(self, part: OutputPart, is_cut_off: bool) -> None:
        kind, place = self._place(part)
        done: dict[str, Any] = {"text": part.text}
        if part.kind == "call":
            done = {"arguments": part.text, "name": part.name}
        elif part.kind == "text":
            done["logprobs"] = self._view.logprobs(part.logprobs)
        self._event(f"{kind}.done", {**place, **done})
        if part.kind != "call":
            self._event(f"{self._part_kind(part)}.done", {**place, "part": self._part(part)})
        item = self._view.item(part, "incomplete" if is_cut_off else "completed")
        self._output.append(item)
        self._event("response.output_item.done", {"output_index": part.index, "item": item})

    def _place(self, part: OutputPart) -> tuple[str, dict[str, Any]]:
        """The name of a part's text events, and the fields that place them."""
        place = {"item_id": self._view.item_id(part), "output_index": part.index}
        if part.kind == "call":
            return "response.function_call_arguments", place
        if part.kind == "text":
            return "response.output_text", {**place, "content_index": 0}
        if self._view.summarizes:
            return "response.reasoning_summary_text", {**place, "summary_index": 0}
        return "response.reasoning_text", {**place, "content_index": 0}

    def _part_kind(self, part: OutputPart) -> str:
        is_summary = part.kind == "reasoning" and self._view.summarizes
        return "response.reasoning_summary_part" if is_summary else "response.content_part"

    def _part(self, part: OutputPart) -> dict[str, Any]:
        view = self._view
        return view.text_part(part) if part.kind == "text" else view.reasoning_part(part)

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        body = orjson.dumps({"type": name, **fields})
        self._frames.append(
            b'event: %b\ndata: %b,"sequence_number":%d}\n\n'
            % (name.encode(), body[:-1], self._sequence_number)
        )
        self._sequence_number += 1

    def _push(self) -> None:
        if self._frames:
            self._sse.push(b"".join(self._frames))
            self._frames.clear()
