"""Collects the events of a push: joins neighbours of a kind, and numbers calls."""

from __future__ import annotations

import re
import secrets
import string

from asyncllm.formats.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

_Kind = type[Content] | type[Reasoning] | type[ToolCallArguments]
_ALPHABET = string.ascii_letters + string.digits
_HALVES = re.compile("[\ud800-\udfff]")


class EventLog:
    """short_ids: call ids of nine letters and digits, with which Mistral's models were trained."""

    def __init__(self, short_ids: bool = False) -> None:
        self.num_calls = 0
        self._short_ids = short_ids
        self._events: list[Event] = []
        self._kind: _Kind = Content
        self._parts: list[str] = []

    def content(self, text: str) -> None:
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def arguments(self, text: str) -> None:
        """Add arguments to the call that began last."""
        self._add(ToolCallArguments, text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._flush()
        self._events.append(ToolCallBegin(self.num_calls, call_id or self._new_id(), name))
        self.num_calls += 1

    def drain(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _add(self, kind: _Kind, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        if text:
            self._parts.append(text)

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if not text:
            return
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, _escape_halves(text)))
        else:
            self._events.append(Content(text) if self._kind is Content else Reasoning(text))


def _escape_halves(text: str) -> str:
    """Escape lone surrogates, which a model wrote escaped, as they are no UTF-8."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
