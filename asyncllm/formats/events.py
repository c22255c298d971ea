"""The events that a parser makes of a model's text while it streams.

They are the interface between parsers and the code that renders responses (chat, responses,
messages). The pieces of a kind join to the whole text; those of a call's arguments, to the text of
one JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(slots=True, frozen=True)
class ToolCallBegin:
    """The beginning of a call of the tool `name`; `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(slots=True, frozen=True)
class ToolCallArguments:
    """A piece of the arguments of call `index`."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Parses the text of one choice, in linear time. Malformed calls become `Content`."""

    def push(self, text: str) -> list[Event]:
        """Add text. Returns the events that are certain now, possibly none."""
        ...

    def close(self) -> list[Event]:
        """The events of the text that was held back, when the text has ended."""
        ...
