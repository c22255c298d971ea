"""Measures the terminals of a Lark grammar: their number, nesting depth and length.

They are found by a pattern, not by parsing, so text in a literal may count as a terminal: the
numbers are upper bounds. llguidance expands terminals where they are named, so a chain of them
takes time with the cube of its length, and doubles if each link names the next one twice.
No function here calls itself by a closure, as that cycle would keep the grammar's text alive.
"""

from __future__ import annotations

import re
from functools import partial

TOO_MANY = 2**62

_DEFINITION = re.compile(
    r"(?<![\w\"-])(_?[A-Z][A-Z0-9_]*)\s*(?:\.\s*\d+\s*)?(?:\[[^\]]*\]\s*)?:(?!:=)"
)
_NAME = re.compile(r"_?\b[A-Z][A-Z0-9_]*\b")
_COUNT = re.compile(r"(?:\{\s*|~\s*)(\d+)")


class LarkTerminals:
    def __init__(self, grammar: str) -> None:
        starts = list(_DEFINITION.finditer(grammar))
        ends = [match.start() for match in starts[1:]] + [len(grammar)] * bool(starts)
        self._bodies = {
            match[1]: grammar[match.end() : end] for match, end in zip(starts, ends, strict=True)
        }
        self._named = {
            name: [other for other in _NAME.findall(body) if other in self._bodies]
            for name, body in self._bodies.items()
        }

    def __len__(self) -> int:
        return len(self._bodies)

    def depth(self) -> int:
        """The length of the longest chain of names; TOO_MANY for a cycle."""

        depth = partial(self._depth, {})
        try:
            return max(map(depth, self._bodies), default=0)
        except RecursionError:
            return TOO_MANY

    def _depth(self, known: dict[str, int], name: str) -> int:
        """The length of the chain from this terminal; `known` caches results."""
        if name not in known:
            depth = partial(self._depth, known)
            known[name] = 1 + max(map(depth, set(self._named[name])), default=0)
        return known[name]

    def max_chars(self) -> int:
        """The size of the longest terminal, with all names and counts expanded."""

        chars = partial(self._chars, {})
        try:
            return max(map(chars, self._bodies), default=0)
        except RecursionError:
            return TOO_MANY

    def _chars(self, known: dict[str, int], name: str) -> int:
        """The size of this terminal; `known` caches results."""
        if name not in known:
            body = self._bodies[name]
            written_out = len(body) + sum(map(partial(self._chars, known), self._named[name]))
            known[name] = min(written_out * product_of_counts(body, _COUNT), TOO_MANY)
        return known[name]


def product_of_counts(text: str, count: re.Pattern[str] = _COUNT) -> int:
    """The product of all repetitions in a text, as if they were nested."""
    product = 1
    for digits in count.findall(text):
        if len(digits) > 18:
            return TOO_MANY
        product = min(product * max(int(digits), 1), TOO_MANY)
    return product
