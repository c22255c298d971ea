"""Builds the text of a grammar in llguidance's Lark from rules.

In llguidance plain text never contains special tokens, so special tokens in a marker are written by
id, and free text extends to the next special token without being searched.
A terminal with a client's text is preceded by a note, by which `noted_terminals` finds it: it may
match nothing, which llguidance does not notice before a text has reached it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

ANY_TEXT = "(?s:.*)"
_ASCII = "dws"  # classes that are ASCII in the patterns of JSON schema
# After a name in capitals, a colon looks like the definition of a terminal to lark_terminals.py.
_COLON = re.compile(r"\\.|(?<!\?)(?<!\?s):", re.DOTALL)
_NOTE = "//!"
_NOTED = re.compile(rf"^{_NOTE} (.*)\n\w+: (.*)$", re.MULTILINE)
# The separators of json.dumps, with which chat templates write earlier calls.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkText:
    """special_ids: the special tokens by their text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._terminals: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}\n")
        return name

    def literal(self, text: str) -> str:
        """An expression for exactly this text."""
        parts: list[str] = []
        start = 0
        for match in self._special.finditer(text):
            parts += [_quoted(text[start : match.start()]), f"<[{self._special_ids[match[0]]}]>"]
            start = match.end()
        parts.append(_quoted(text[start:]))
        return " ".join(filter(None, parts))

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def json(self, schema: Mapping[str, Any], strict: bool) -> str:
        """A JSON value. Unless `strict`, keywords that cannot be enforced are removed."""
        lenient = {} if strict else {"lenient": True, "coerce_one_of": True}
        written = json.dumps({**schema, "x-guidance": {**_JSON_STYLE, **lenient}})
        return self.rule(f"%json {written}".replace("\x7f", "\\u007f"))

    def text_until(self, marker: str) -> str:
        """Any text up to and including the first `marker`."""
        special = self._special.search(marker)
        if special is None:
            return self.rule(f"/{ANY_TEXT}/ {_quoted(marker)}", "[lazy]")
        before = _code_points(marker[: special.start()])
        return self.rule(f"/{ANY_TEXT}{before}/ {self.literal(marker[special.start() :])}")

    def text_matching(
        self, options: Sequence[Sequence[str]], before: str, marker: str, note: str
    ) -> str:
        """A text, `before` and the first `marker`. The text matches all regexes of an option.

        Plain text is one terminal, as the lexer takes the longest match, and the beginning of the
        marker may be a part of the text.
        """
        special = self._special.search(marker)
        end = len(marker) if special is None else special.start()
        texts = [" & ".join(map(_regex, regexes)) for regexes in options]
        text = f"({' | '.join(f'({text})' for text in texts)}) {_quoted(before + marker[:end])}"
        if special is None:
            text = f"({text}) & ~/{ANY_TEXT}{_code_points(marker)}(?s:.+)/"
        return self.rule(f"{self.terminal(text, note)} {self.literal(marker[end:])}")

    def terminal(self, body: str, note: str = "") -> str:
        """Add a terminal, an expression that is matched as a whole. Returns its name.

        note: a description on one line, for a terminal that may match nothing.
        """
        name = f"T{len(self._terminals)}"
        self._terminals.append(f"{_NOTE} {note}\n" * bool(note) + f"{name}: {body}\n")
        return name

    def build(self, start: str) -> str:
        return f"start: {start}\n{''.join(self._rules)}{''.join(self._terminals)}"


def noted_terminals(lark: str) -> Iterator[tuple[str, str]]:
    """The note and the body of each terminal with a note."""
    return (match.groups() for match in _NOTED.finditer(lark))  # type: ignore[misc]


def _regex(pattern: str) -> str:
    written = _COLON.sub(lambda m: r"\x3a" if m[0][-1] == ":" else m[0], pattern)
    return f"/{regex_to_lark(written, _ASCII)}/"


def _code_points(text: str) -> str:
    """A regex for exactly this text, without line breaks and slashes."""
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)


def _quoted(text: str) -> str:
    if not text:
        return ""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
