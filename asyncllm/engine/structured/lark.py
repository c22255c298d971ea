"""Lark for llguidance, put together from rules of ours and grammars of the client's.

Each client grammar stays a grammar of its own beside the top one (`@name`), so that no name of
ours can meet one of its own.
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
        """JSON by `schema`, with llguidance's own `options`."""
        return self.rule(f"%json {_json_text({**schema, 'x-guidance': options})}")

    def regex(self, pattern: str) -> str:
        body = llguidance.regex_to_lark(pattern, "").replace("\n", "\\n")
        return self.terminal(f"/{body}/", f"the regex {pattern!r:.100}")

    def lark(self, grammar: str) -> str:
        """The start of a client's own grammar."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def grammars(self, start: str, *, forcing: bool) -> str:
        """The grammar that llguidance takes; `start` is an expression of rules made here."""
        return self.own_grammars(self.build(start), forcing=forcing)

    def own_grammars(self, lark: str, *, forcing: bool) -> str:
        """The same of a whole grammar."""
        top = {"lark_grammar": lark if forcing else NO_FORCING + lark}
        return orjson.dumps({"grammars": [top, *self._grammars]}).decode()


def quoted(text: str) -> str:
    """Exactly this text, never a special token."""
    return _json_text(text)


def _json_text(value: Any) -> str:
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")  # which Lark does not read
