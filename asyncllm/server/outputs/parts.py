"""An answer in parts: runs of text, of thinking, and calls, in the order in which they came.

What /v1/responses calls output items and /v1/messages content blocks. Both send an answer as its
parts, streamed or whole, so both walk its events with `AnswerParts`. White space between two parts
belongs to neither: it is held back until text follows, and forgotten where none does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from asyncllm.formats.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from asyncllm.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from asyncllm.server.http.errors import ApiError
from asyncllm.server.inputs.call import Usage

PartKind = Literal["text", "reasoning", "call"]
TextEvent = Content | Reasoning | ToolCallArguments
_GOES_ON: dict[PartKind, tuple[type[TextEvent], ...]] = {
    "text": (Content,),
    "reasoning": (Reasoning,),
    "call": (ToolCallArguments,),
}


@dataclass(slots=True, eq=False)
class AnswerPart:
    """`index` counts the answer's parts from 0. A call has a name, an id, and JSON for its text."""

    index: int
    kind: PartKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class News(NamedTuple):
    """What one event changes, in this order."""

    closed: AnswerPart | None
    opened: AnswerPart | None
    text: str  # of the part that is open now


class AnswerParts:
    """Which part an event belongs to. Keeps no text: who wants it adds `News.text` to the part.

    `goes_on`: for isinstance, the event that is but more text of the open part; a stream looks for
    it first.
    """

    def __init__(self) -> None:
        self.open: AnswerPart | None = None
        self.goes_on: tuple[type[TextEvent], ...] = ()
        self._num_parts = 0
        self._blanks = ""

    def add(self, event: Event) -> News:
        if isinstance(event, self.goes_on):
            return News(None, None, event.text)
        match event:
            case Content(text):
                return self._add_content(text)
            case Reasoning(text) if text:
                return self._begin("reasoning", text)
            case ToolCallBegin(_, call_id, name):
                return self._begin("call", "", call_id, name)
        return News(None, None, "")

    def flush(self) -> News:
        """The answer has ended. If it was nothing but white space, that is its text after all."""
        if self._num_parts == 0 and self._blanks:
            return self._begin("text", self._blanks)
        return News(None, None, "")

    def _add_content(self, text: str) -> News:
        self._blanks += text
        if not text or text.isspace():
            return News(None, None, "")
        return self._begin("text", self._blanks)

    def _begin(self, kind: PartKind, text: str, call_id: str = "", name: str = "") -> News:
        closed = self.open
        self._blanks = ""
        self.open = AnswerPart(self._num_parts, kind, call_id, name)
        self.goes_on = _GOES_ON[kind]
        self._num_parts += 1
        return News(closed, self.open, text)


class PartsCollector:
    """An `AnswerSink` for an answer of one choice that is sent whole."""

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self.usage = Usage()
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self._walk = AnswerParts()
        self._logprobs: SampleLogprobs = []  # of tokens whose text has not come yet

    def opened(self, choice: int, output: RequestOutput) -> None:
        pass

    def said(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        if completion is not None and completion.logprobs:
            self._logprobs += completion.logprobs
        for event in events:
            self._take(self._walk.add(event))

    def ended(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self._take(self._walk.flush())
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason

    def finish(self, usage: Usage) -> None:
        self.usage = usage

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it

    def _take(self, news: News) -> None:
        if news.opened is not None:
            self.parts.append(news.opened)
        part = self._walk.open
        if part is not None and news.text:
            part.pieces.append(news.text)
            part.logprobs += self._logprobs
            self._logprobs = []
