"""What the server asks of a model's format: what it can tell apart, and a parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncllm.formats.events import AnswerParser
from asyncllm.server.tool_use import Tool


class ChatFormat(Protocol):
    reads_reasoning: bool
    reads_calls: bool
    keeps_special_tokens: bool  # its markers are special tokens, which must stay in the text

    def parser(self, tools: Sequence[Tool], prompt: str) -> AnswerParser:
        """For what follows `prompt`. With no tools nothing is a call."""
        ...
