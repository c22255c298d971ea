"""A message's output in parts: runs of text, of reasoning, and tool calls, in order.

/v1/responses calls them output items and /v1/messages content blocks; their sinks are `PartsSink`s.
White space between two parts belongs to neither: it is held back until text follows,
and dropped where none does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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


class PartsSink:
    """Splits the events of one choice into parts; a subclass is an `EventSink` and writes them.

    Most events only bring more text of the open part: they are tested for first.
    """

    def __init__(self) -> None:
        self._open: OutputPart | None = None
        self._continues: tuple[type[TextEvent], ...] = ()  # the events of the open part's text
        self._num_parts = 0
        self._blanks = ""

    def open_part(self, part: OutputPart) -> None:
        raise NotImplementedError

    def add_text(self, part: OutputPart, text: str) -> None:
        """`text` is not empty."""
        raise NotImplementedError

    def close_part(self, part: OutputPart, is_cut_off: bool) -> None:
        """`is_cut_off`: the answer ended within it, for its length."""

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case _ if self._open is not None and isinstance(event, self._continues):
                    if event.text:
                        self.add_text(self._open, event.text)
                case Content(text):
                    self._blanks += text
                    if text and not text.isspace():
                        self._begin("text", self._blanks)
                case Reasoning(text) if text:
                    self._begin("reasoning", text)
                case ToolCallBegin(_, call_id, name):
                    self._begin("call", "", call_id, name)

    def end_parts(self, finish_reason: str) -> None:
        """If the message was nothing but white space, that is its text after all."""
        if self._num_parts == 0 and self._blanks:
            self._begin("text", self._blanks)
        if self._open is not None:
            self.close_part(self._open, finish_reason == "length")

    def _begin(self, kind: PartKind, text: str, call_id: str = "", name: str = "") -> None:
        if self._open is not None:
            self.close_part(self._open, is_cut_off=False)
        self._blanks = ""
        self._open = OutputPart(self._num_parts, kind, call_id, name)
        self._continues = _CONTINUES[kind]
        self._num_parts += 1
        self.open_part(self._open)
        if text:
            self.add_text(self._open, text)


class PartsCollector(PartsSink):
    """Collects the parts, for responses that are not streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[OutputPart] = []
        self.usage = Usage()
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self._logprobs: SampleLogprobs = []  # of tokens whose text has not come yet

    def begin_choice(self, choice: int, output: RequestOutput) -> None:
        pass

    def emit(self, choice: int, events: list[Event], completion: CompletionOutput | None) -> None:
        if completion is not None and completion.logprobs:
            self._logprobs += completion.logprobs
        self.take(events)

    def end_choice(self, choice: int, finish_reason: str, stop_reason: int | str | None) -> None:
        self.end_parts(finish_reason)
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason

    def finish(self, usage: Usage) -> None:
        self.usage = usage

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it

    def open_part(self, part: OutputPart) -> None:
        self.parts.append(part)

    def add_text(self, part: OutputPart, text: str) -> None:
        part.pieces.append(text)
        part.logprobs += self._logprobs
        self._logprobs = []
