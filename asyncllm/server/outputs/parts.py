"""A message's output in parts: runs of text, of reasoning, and tool calls, in order.

/v1/responses calls them output items and /v1/messages content blocks; both split the events with
`OutputParts`. White space between two parts belongs to neither: it is held back until text follows,
and dropped where none does.
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
_CONTINUES: dict[PartKind, tuple[type[TextEvent], ...]] = {
    "text": (Content,),
    "reasoning": (Reasoning,),
    "call": (ToolCallArguments,),
}


@dataclass(slots=True, eq=False)
class OutputPart:
    """`index` counts the message's parts from 0. A call has a name, an id, and JSON as text."""

    index: int
    kind: PartKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartUpdate(NamedTuple):
    """The changes that one event makes, in this order."""

    closed: OutputPart | None
    opened: OutputPart | None
    text: str  # of the part that is open now


class OutputParts:
    """Assigns events to parts. Keeps no text: a caller adds `PartUpdate.text` to the part.

    `continues`: for isinstance, the event type that is only more text of the open part; a stream
    tests for it first.
    """

    def __init__(self) -> None:
        self.open: OutputPart | None = None
        self.continues: tuple[type[TextEvent], ...] = ()
        self._num_parts = 0
        self._blanks = ""

    def add(self, event: Event) -> PartUpdate:
        if isinstance(event, self.continues):
            return PartUpdate(None, None, event.text)
        match event:
            case Content(text):
                return self._add_content(text)
            case Reasoning(text) if text:
                return self._begin("reasoning", text)
            case ToolCallBegin(_, call_id, name):
                return self._begin("call", "", call_id, name)
        return PartUpdate(None, None, "")

    def flush(self) -> PartUpdate:
        """End the message. If it was nothing but white space, that is its text after all."""
        if self._num_parts == 0 and self._blanks:
            return self._begin("text", self._blanks)
        return PartUpdate(None, None, "")

    def _add_content(self, text: str) -> PartUpdate:
        self._blanks += text
        if not text or text.isspace():
            return PartUpdate(None, None, "")
        return self._begin("text", self._blanks)

    def _begin(self, kind: PartKind, text: str, call_id: str = "", name: str = "") -> PartUpdate:
        closed = self.open
        self._blanks = ""
        self.open = OutputPart(self._num_parts, kind, call_id, name)
        self.continues = _CONTINUES[kind]
        self._num_parts += 1
        return PartUpdate(closed, self.open, text)


class PartsCollector:
    """An `EventSink` that collects the parts of one choice, for responses that are not streamed."""

    def __init__(self) -> None:
        self.parts: list[OutputPart] = []
        self.usage = Usage()
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self._walk = OutputParts()
        self._logprobs: SampleLogprobs = []  # of tokens whose text has not come yet

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        pass

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        if completion is not None and completion.logprobs:
            self._logprobs += completion.logprobs
        for event in events:
            self._apply(self._walk.add(event))

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self._apply(self._walk.flush())
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason

    def finish(self, usage: Usage) -> None:
        self.usage = usage

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it

    def _apply(self, update: PartUpdate) -> None:
        if update.opened is not None:
            self.parts.append(update.opened)
        part = self._walk.open
        if part is not None and update.text:
            part.pieces.append(update.text)
            part.logprobs += self._logprobs
            self._logprobs = []
