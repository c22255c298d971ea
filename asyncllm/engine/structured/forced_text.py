"""Whether a grammar may force a long text.

Where only one text can come next, llguidance finds all of it before it says which token may come:
fast for a property's name, most of a second for `a{1000000}`, at every step. So a grammar that may
force more than `MAX_FORCED_CHARS` by one terminal is compiled without forcing: its tokens are then
chosen one by one like any others. (What many terminals force together, llguidance limits itself.)
These are estimates from the text, and may only be too high.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

MAX_FORCED_CHARS = 8192
TOO_MANY = 2**62

_COUNT = re.compile(r"\{\s*(\d+)")
_LARK_COUNT = re.compile(r"(?:\{\s*|~\s*)(\d+)")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_TERMINAL = re.compile(r"^[ \t]*(_?[A-Z][A-Z0-9_]*)[^:\n]*:", re.MULTILINE)
_NAME = re.compile(r"_?\b[A-Z][A-Z0-9_]*\b")


def schema_forces_little(schema: Any) -> bool:
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            least = node.get("minLength")  # with a pattern of one letter
            if isinstance(least, int) and least > MAX_FORCED_CHARS:
                return False
            todo.extend(node.values())
            todo.extend(node)
        elif isinstance(node, list):
            todo.extend(node)
        elif isinstance(node, str) and not regex_forces_little(node):
            return False
    return True


def regex_forces_little(pattern: str) -> bool:
    return max(len(pattern), _product(_COUNT, pattern)) <= MAX_FORCED_CHARS


def lark_forces_little(grammar: str) -> bool:
    """Terminals are weighed with those that they name, rules by their literals and regexes."""
    if any(len(match[0]) > MAX_FORCED_CHARS for match in _LITERAL.finditer(grammar)):
        return False
    if any(_product(_LARK_COUNT, line) > MAX_FORCED_CHARS for line in grammar.splitlines()):
        return False
    starts = list(_TERMINAL.finditer(grammar))
    bodies: dict[str, str] = {}
    ends = [*(match.start() for match in starts[1:]), len(grammar)]
    for match, end in zip(starts, ends, strict=False):
        bodies[match[1]] = grammar[match.end() : end]

    @cache
    def weight(name: str) -> int:
        body = bodies[name]
        named = sum(weight(other) for other in _NAME.findall(body) if other in bodies)
        return min((len(body) + named) * _product(_LARK_COUNT, body), TOO_MANY)

    try:
        return max(map(weight, bodies), default=0) <= MAX_FORCED_CHARS
    except RecursionError:  # terminals that name themselves, or a very long chain
        return False


def _product(count: re.Pattern[str], text: str) -> int:
    product = 1
    for digits in count.findall(text):
        if len(digits) > 18:
            return TOO_MANY
        product = min(product * max(int(digits), 1), TOO_MANY)
    return product
