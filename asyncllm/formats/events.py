"""Events that a model's text is parsed into, piece by piece as it streams.

The vocabulary between a format's parser and what renders a response (chat, responses, messages).
Concatenating the pieces of a kind gives the whole; a call's arguments are the text of one JSON
object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Content:
    """A piece of the answer proper."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """A piece of the thinking that precedes it."""

    text: str


@dataclass(slots=True, frozen=True)
class ToolCallBegin:
    """The model calls the tool `name`; `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(slots=True, frozen=True)
class ToolCallArguments:
    """A piece of call `index`'s arguments."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Reads one choice's text. Linear in its length; what is malformed comes out as `Content`."""

    def push(self, text: str) -> list[Event]:
        """Return the events that this text makes certain, possibly none yet."""
        ...

    def close(self) -> list[Event]:
        """The text has ended: what was held back."""
        ...
