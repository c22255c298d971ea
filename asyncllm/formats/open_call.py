"""A call while it is read: undecided, then begun.

Until it has begun, what is read of it is held, and becomes content if it was no call after all;
then its name is out and cannot be unsaid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncllm.formats.cursor import Cursor, Reading
from asyncllm.formats.event_log import EventLog
from asyncllm.formats.values import resolved, types_of

MAX_NAME_CHARS = 256

_NAME = re.compile(r"[\w.\-:]+")


class OpenCall:
    """`tools`: the names that may be called, with their parameters' schemas."""

    def __init__(
        self, cursor: Cursor, log: EventLog, tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.cursor = cursor
        self.arguments = log.arguments
        self.begun = False
        self._log = log
        self._tools = tools

    def read_name(self) -> Reading[str]:
        """Nothing where none is next. It may be no tool's."""
        yield from self.cursor.spaces()
        return (yield from self.cursor.run(_NAME, MAX_NAME_CHARS))

    def is_tool(self, name: str | None) -> bool:
        return name in self._tools

    def argument_types(self, name: str, key: str) -> frozenset[str]:
        """The tool's schema of an argument; empty where it has none."""
        root = self._tools[name]
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return types_of(resolved(schema, root)) if isinstance(schema, dict) else frozenset()

    def begin(self, name: str, call_id: str | None = None) -> None:
        assert self.is_tool(name) and not self.begun
        self.cursor.let_go()
        self._log.begin_call(name, call_id)
        self.begun = True
