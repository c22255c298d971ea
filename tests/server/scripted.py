"""Answers with thinking and calls from the fake engine, and a parser that knows how they are cut.

<think>why</think>text<call f>{"a": 1}</call>
"""

from __future__ import annotations

import pytest

from asyncllm.formats.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from asyncllm.server import message_call
from tests.server import fake_engine

THOUGHT_AND_CALLS = (
    "<think>Grün?</think>\n\nI will ask.\n"
    '<call weather>{"city": "Köln"}</call>\n<call time>{}</call>'
)


class ScriptedParser:
    def __init__(self) -> None:
        self._held = ""
        self._mode = "text"
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for char in text:
            self._held += char
            if self._held[0] != "<":
                events += self._piece(self._held)
            elif char == ">":
                events += self._mark(self._held[1:-1])
            else:
                continue
            self._held = ""
        return events

    def close(self) -> list[Event]:
        return self._piece(self._held) if self._held else []

    def _piece(self, text: str) -> list[Event]:
        if self._mode == "think":
            return [Reasoning(text)]
        if self._mode == "call":
            return [ToolCallArguments(self._num_calls - 1, text)]
        return [Content(text)]

    def _mark(self, mark: str) -> list[Event]:
        word, _, name = mark.partition(" ")
        self._mode = "text" if word.startswith("/") else word
        if word != "call":
            return []
        self._num_calls += 1
        return [ToolCallBegin(self._num_calls - 1, f"call_{self._num_calls}", name)]


def script(monkeypatch: pytest.MonkeyPatch, answer: str = THOUGHT_AND_CALLS) -> None:
    """The fake engine says `answer`, and the server understands it."""
    monkeypatch.setattr(fake_engine, "reply", lambda index: answer)
    monkeypatch.setattr(message_call, "PlainParser", ScriptedParser)
