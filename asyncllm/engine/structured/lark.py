"""Lark text for llguidance, put together from rules of ours and grammars of the client's.

Each client grammar stays a grammar of its own beside the top one (`@name`), so that no name of
ours can meet one of its own. A special token inside a literal is written by its id: to llguidance
plain text never contains one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import llguidance
import orjson

ANY_TEXT = "/(?s:.*)/"
NO_FORCING = '%llguidance {"no_forcing": true}\n'


class LarkBuilder:
    """`special_ids`: the special tokens by their text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []

    def special_id(self, text: str) -> int | None:
        return self._special_ids.get(text)

    def literal(self, text: str) -> str:
        """An expression for exactly this text."""
        parts: list[str] = []
        start = 0
        for match in self._special.finditer(text):
            parts += [quoted(text[start : match.start()]), f"<[{self._special_ids[match[0]]}]>"]
            start = match.end()
        parts.append(quoted(text[start:]))
        return " ".join(part for part in parts if part) or '""'

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}\n")
        return name

    def terminal(self, body: str) -> str:
        """The name of a new terminal: an expression that is matched as one."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}\n")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {_json_text(schema)}")

    def regex(self, pattern: str) -> str:
        return self.rule(regex_literal(pattern))

    def lark(self, grammar: str) -> str:
        """The start of a client's own grammar."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def text_until(self, end: str) -> str:
        """Any text up to the first `end`, that included. No special token but `end` in it."""
        if self.special_id(end) is not None:
            return self.rule(f"{ANY_TEXT} {self.literal(end)}")
        return self.rule(f"{ANY_TEXT} {quoted(end)}", "[lazy]")

    def build(self, start: str, *, forcing: bool) -> str:
        """What llguidance takes; `start` is an expression of rules made here."""
        return self.build_own(f"start: {start}\n{''.join(self._rules)}", forcing)

    def build_own(self, lark: str, forcing: bool) -> str:
        """The same of a whole grammar."""
        top = {"lark_grammar": lark if forcing else NO_FORCING + lark}
        return orjson.dumps({"grammars": [top, *self._grammars]}).decode()


def quoted(text: str) -> str:
    return _json_text(text) if text else ""


def regex_literal(pattern: str) -> str:
    body = llguidance.regex_to_lark(pattern, "").replace("\n", "\\n")
    return f"/{body}/"


def _json_text(value: Any) -> str:
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")  # which Lark does not read
