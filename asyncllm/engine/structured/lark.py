"""Builds Lark for llguidance from our own rules and the grammars of a client.

Each client grammar is a separate grammar that the top one refers to (`@name`), so that its names
cannot clash with ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llguidance
import orjson

from asyncllm.formats.lark_text import LarkText

ANY_TEXT = "/(?s:.*)/"
NO_FORCING = '%llguidance {"no_forcing": true}\n'


class LarkBuilder(LarkText):
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        super().__init__(special_ids)
        self._grammars: list[dict[str, Any]] = []

    def value_of(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """JSON by `schema`, with llguidance's `options`."""
        return self.rule(f"%json {quoted({**schema, 'x-guidance': options})}")

    def regex(self, pattern: str) -> str:
        body = llguidance.regex_to_lark(pattern, "").replace("\n", "\\n")
        return self.terminal(f"/{body}/", f"the regex {pattern!r:.100}")

    def lark(self, grammar: str) -> str:
        """A reference to a client's grammar."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def grammars(self, start: str, *, forcing: bool) -> str:
        """The complete grammar. start: an expression of rules from this builder."""
        return self.own_grammars(self.build(start), forcing=forcing)

    def own_grammars(self, lark: str, *, forcing: bool) -> str:
        """As `grammars`, for a complete Lark grammar."""
        top = {"lark_grammar": lark if forcing else NO_FORCING + lark}
        return orjson.dumps({"grammars": [top, *self._grammars]}).decode()


def quoted(value: Any) -> str:
    """JSON for Lark; of a text, a literal that is never a special token."""
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")  # not allowed in Lark
