"""A call while it is read: first undecided, then begun.

Until it has begun, its text is held, and becomes content if it is no call. Afterwards its name has
been sent and cannot be taken back.
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
    """tools: the names that may be called, with the schemas of their parameters.

    takes_unknown: calls of unknown tools are calls, too, so that the client learns of them. This is
    for marked calls; without a marker, the text is more likely a JSON or list that was asked for.
    """

    def __init__(
        self,
        cursor: Cursor,
        log: EventLog,
        tools: Mapping[str, Mapping[str, Any]],
        takes_unknown: bool,
    ) -> None:
        self.cursor = cursor
        self.arguments = log.arguments
        self.begun = False
        self._log = log
        self._tools = tools
        self._takes_unknown = takes_unknown

    def read_name(self) -> Reading[str]:
        """Read a name, which may be no tool; "" if there is none."""
        yield from self.cursor.spaces()
        return (yield from self.cursor.run(_NAME, MAX_NAME_CHARS))

    def is_tool(self, name: str) -> bool:
        return name in self._tools

    def may_be(self, name: str | None) -> bool:
        """Whether a call of this name counts as a call."""
        if name is None or name in self._tools:
            return name is not None
        return self._takes_unknown and bool(_NAME.fullmatch(name)) and len(name) <= MAX_NAME_CHARS

    def argument_types(self, name: str, key: str) -> frozenset[str]:
        """The types of an argument in the tool's schema; empty without a type."""
        root = self._tools.get(name, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return types_of(resolved(schema, root)) if isinstance(schema, dict) else frozenset()

    def begin(self, name: str, call_id: str | None = None) -> None:
        assert self.may_be(name) and not self.begun
        self.cursor.let_go()
        self._log.begin_call(name, call_id)
        self.begun = True
