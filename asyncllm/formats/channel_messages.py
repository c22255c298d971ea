"""Reads answers that consist of messages with headers (OpenAI's harmony).

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
A call is a message to `functions.name`. A header without an end is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from asyncllm.formats.answer_format import ChannelSyntax
from asyncllm.formats.cursor import Cursor, Emit, Reading
from asyncllm.formats.event_log import EventLog
from asyncllm.formats.json_calls import pass_arguments
from asyncllm.formats.open_call import OpenCall
from asyncllm.formats.text_markers import TextMarkers, text_markers


class ChannelReader:
    """new_call: makes a call that is read from the same text. noise: removed from messages."""

    def __init__(
        self,
        syntax: ChannelSyntax,
        cursor: Cursor,
        log: EventLog,
        new_call: Callable[[], OpenCall],
        noise: Collection[str] = (),
    ) -> None:
        self._syntax = syntax
        self._cursor = cursor
        self._new_call = new_call
        self._address = re.compile(re.escape(syntax.recipient) + r"([\w.\-]+)")
        self._header_ends = text_markers(syntax.message, *syntax.ends)
        self._body_ends = TextMarkers({*syntax.begins, *syntax.ends, *noise})
        self._content = _Messages(log.content)
        self._reasoning = _Messages(log.reasoning)

    def read_answer(self) -> Reading[None]:
        """Read an answer whose first header was begun by the prompt."""
        yield from self._cursor.spaces()
        has_address = yield from self._cursor.literal(self._syntax.recipient)
        header: str | None = self._syntax.recipient if has_address else ""
        while header is not None:
            if not header:
                header = yield from self._read_text(self._content)
            elif (yield from self._read_header(header)):
                header = yield from self._read_message()
            else:
                return

    def _read_header(self, begin: str) -> Reading[bool]:
        """Read a header into `self._header`. False at the end of the text."""
        parts = [begin]
        while True:
            found = yield from self._cursor.until(self._header_ends, parts.append)
            self._header = "".join(parts)
            if found is None:
                self._content(self._header)
                return False
            if found[1] == self._syntax.message:
                return True
            parts += found

    def _read_message(self) -> Reading[str | None]:
        address = self._address.search(self._header)
        call = self._new_call()
        if address and call.may_be(address[1]):
            return (yield from self._read_call(call, address[1]))
        kind = self._reasoning if self._syntax.reasoning in self._header else self._content
        kind.begin()
        return (yield from self._read_text(kind))

    def _read_call(self, call: OpenCall, name: str) -> Reading[str | None]:
        yield from self._cursor.spaces()
        yield from pass_arguments(call, name)
        rest: list[str] = []
        header = yield from self._read_text(rest.append)
        text = "".join(rest)
        if text.strip():
            self._content.begin()
            self._content(text)
        elif not call.begun and header is not None:
            call.begin(name)
            call.arguments("{}")
        return header

    def _read_text(self, emit: Emit) -> Reading[str | None]:
        """Read a message's text. Returns the beginning of the next header, if that ends it; "" if
        its own end does; None if the answer ends.
        """
        while True:
            found = yield from self._cursor.until(self._body_ends, emit)
            if found is None:
                return None
            gap, marker = found
            if marker in self._syntax.begins:
                return marker
            if marker in self._syntax.ends:
                yield from self._cursor.spaces()
                return ""
            emit(gap)


class _Messages:
    """Joins the messages of a kind with line breaks."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._before = ""
        self._is_empty = True

    def begin(self) -> None:
        self._before = "" if self._is_empty else "\n"

    def __call__(self, text: str) -> None:
        if text:
            self._emit(self._before + text)
            self._before = ""
            self._is_empty = False
