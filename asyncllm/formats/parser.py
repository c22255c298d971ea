"""The parser of answers for all formats, which interprets the record of a format.

Text is content until a marker. Text that begins like a call but is none is content, and so are
unmarked calls of unknown tools. After a call's name has been sent, its arguments end where they
become invalid, and the text after them is content again. White space beside a marker belongs to the
marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.formats.answer_format import (
    CallSyntax,
    JsonCall,
    LiteralArguments,
    Markers,
    NamedJson,
    TaggedArguments,
)
from asyncllm.formats.channel_messages import ChannelReader
from asyncllm.formats.cursor import Cursor, Reading
from asyncllm.formats.event_log import EventLog
from asyncllm.formats.events import Content, Event, Reasoning
from asyncllm.formats.json_calls import read_json_call, read_named_json
from asyncllm.formats.literal_calls import read_literal_call
from asyncllm.formats.open_call import OpenCall
from asyncllm.formats.reading_plan import Beginning, ReadingPlan, stray_ends
from asyncllm.formats.tagged_calls import read_tagged_call
from asyncllm.formats.text_markers import TextMarkers


class FormatParser:
    """An `AnswerParser`. tools: the names that may be called, with the schemas of their parameters.

    in_reasoning: the prompt has opened the reasoning. takes_unknown: marked calls of unknown tools
    count as calls.
    """

    def __init__(
        self,
        plan: ReadingPlan,
        tools: Mapping[str, Mapping[str, Any]],
        in_reasoning: bool = False,
        takes_unknown: bool = False,
    ) -> None:
        self._plan = plan
        self._tools = tools
        self._in_reasoning = in_reasoning
        self._takes_unknown = takes_unknown
        self._cursor = Cursor()
        self._log = EventLog(plan.format.short_ids)
        self._strays: set[str] = set()  # ends of incomplete calls, removed where they occur
        self._blank = ""  # white space that was read before a possible call
        # The next piece of running text is passed on at once if no marker begins in it.
        self._running: tuple[TextMarkers, type[Content | Reasoning]] | None = None
        self._run = self._answer()
        next(self._run)

    def push(self, text: str) -> list[Event]:
        if self._running is not None and self._cursor.is_empty:
            markers, kind = self._running
            if markers.none_in(text):
                return [kind(text)] if text else []
        self._cursor.push(text)
        next(self._run)
        return self._log.drain()

    def close(self) -> list[Event]:
        self._cursor.ended = True
        for _ in self._run:
            raise AssertionError("reading waits although the text has ended")
        return self._log.drain()

    def _answer(self) -> Reading[None]:
        channels = self._plan.format.channels
        if channels is not None:
            reader = ChannelReader(
                channels, self._cursor, self._log, self._new_call, self._plan.noise
            )
            yield from reader.read_answer()
            return
        trigger = yield from self._reasoning_part()
        while True:
            if trigger is None:
                yield from self._unmarked_calls()
                trigger = yield from self._content_part()
                if trigger is None:
                    return
            yield from self._read_calls(self._plan.by_trigger[trigger], (trigger,))
            trigger = None

    # --- running text ------------------------------------------------------------------------

    def _reasoning_part(self) -> Reading[str | None]:
        """Read reasoning to its end. Returns the trigger of a call that ended it."""
        marks = self._plan.format.reasoning
        if marks is None:
            return None
        yield from self._read_blank()
        if (yield from self._cursor.literal(marks.begin)):
            self._in_reasoning = True
        if not self._in_reasoning:
            return None
        self._blank = ""
        yield from self._cursor.spaces()
        markers = self._plan.reasoning_markers
        while True:
            self._running = markers, Reasoning
            found = yield from self._cursor.until(markers, self._log.reasoning)
            self._running = None
            if found is None:
                return None
            gap, marker = found
            if marker == marks.end:
                yield from self._cursor.spaces()
                return None
            if marker in self._plan.ends_reasoning:
                self._cursor.hold(gap + marker)
                return marker
            self._log.reasoning(gap)

    def _content_part(self) -> Reading[str | None]:
        """Read content up to the trigger of a call, which is held and returned; None at the end."""
        while True:
            if not self._blank:
                self._running = self._plan.content_markers, Content
            found = yield from self._cursor.until(self._plan.content_markers, self._say)
            self._running = None
            if found is None:
                self._say("")
                return None
            gap, marker = found
            if marker in self._plan.by_trigger:
                self._cursor.hold(self._blank + gap + marker)
                self._blank = ""
                return marker
            if marker in self._plan.format.noise:
                yield from self._cursor.spaces()
            elif marker in self._plan.noise or marker in self._strays:
                self._strays.discard(marker)
                self._blank += gap
            else:
                self._say(gap + marker)

    def _say(self, text: str) -> None:
        self._log.content(self._blank + text)
        self._blank = ""

    def _say_unless_blank(self, text: str) -> None:
        if text.strip():
            self._say(text)

    def _read_blank(self) -> Reading[None]:
        self._cursor.hold(self._blank)
        yield from self._cursor.spaces()
        self._blank = self._cursor.let_go()

    # --- calls -------------------------------------------------------------------------------

    def _unmarked_calls(self) -> Reading[None]:
        """Read unmarked calls at the beginning of content."""
        while self._plan.at_start:
            yield from self._read_blank()
            self._cursor.hold(self._blank)
            self._blank = ""
            if not (yield from self._read_calls(self._plan.at_start)):
                return

    def _read_calls(self, beginnings: list[Beginning], read: Markers = ()) -> Reading[bool]:
        """Read the calls of a section, in the first syntax that fits. read: the part of its
        beginning that was read already. If no syntax fits, the text is content.
        """
        for beginning in beginnings:
            words = beginning.words
            if words[: len(read)] != read:
                continue
            while len(read) < len(words) and (
                yield from self._cursor.literals((words[len(read)],))
            ):
                read = words[: len(read) + 1]
            if read == words and (yield from self._section(beginning.syntax)):
                yield from self._cursor.spaces()
                return True
        self._say(self._cursor.let_go())
        return False

    def _section(self, syntax: CallSyntax) -> Reading[bool]:
        """Read the first call and those after it. False if the first is none."""
        call = self._new_call(syntax.is_marked)
        is_whole = yield from self._read_call(call, syntax)
        if not call.begun:
            return False
        self._strays = set()
        while is_whole and (syntax.end or syntax.separator):
            self._cursor.hold()
            goes_on = yield from self._read_separator(syntax)
            if syntax.end and (yield from self._cursor.literals(syntax.end)):
                self._cursor.let_go()
                return True
            is_whole = goes_on and (yield from self._following_call(syntax))
            self._say_unless_blank(self._cursor.let_go())
        if not is_whole:
            self._say_unless_blank(self._cursor.let_go())
            self._strays = stray_ends(syntax)
        return True

    def _read_separator(self, syntax: CallSyntax) -> Reading[bool]:
        """Whether a call may follow; one with its own marker needs no separator."""
        if syntax.separator and (yield from self._cursor.literals((syntax.separator,))):
            return True
        return not syntax.separator or bool(syntax.end and syntax.call_begin)

    def _following_call(self, syntax: CallSyntax) -> Reading[bool]:
        """Read the next call. False if there is none, or if it is incomplete."""
        if not (yield from self._cursor.literals(syntax.call_begin)):
            return False
        call = self._new_call(syntax.is_marked)
        return (yield from self._read_call(call, syntax)) and call.begun

    def _new_call(self, is_marked: bool = True) -> OpenCall:
        takes_unknown = is_marked and self._takes_unknown
        return OpenCall(self._cursor, self._log, self._tools, takes_unknown)

    def _read_call(self, call: OpenCall, syntax: CallSyntax) -> Reading[bool]:
        match syntax.body:
            case JsonCall() as body:
                is_whole = yield from read_json_call(call, body)
            case NamedJson() as body:
                is_whole = yield from read_named_json(call, body)
            case TaggedArguments() as body:
                is_whole = yield from read_tagged_call(call, body)
            case LiteralArguments() as body:
                is_whole = yield from read_literal_call(call, body)
        is_whole = is_whole and (yield from self._cursor.literals(syntax.call_end))
        if call.begun and self._cursor.ended:
            self._cursor.let_go()  # arguments that are cut by the end of the text are no content
        return is_whole
