"""Whether a grammar may force a long text.

Where only one text can come next, llguidance finds all of it before it says which token may come:
fast for a property's name, most of a second for `a{1000000}`, at every step. So a grammar that may
force more than `MAX_FORCED_CHARS` by one terminal is compiled without forcing: its tokens are then
chosen one by one like any others. (What many terminals force together, llguidance limits itself.)
These are estimates from the text, and may only be too high.
"""

from __future__ import annotations

import re
from typing import Any

from asyncllm.engine.structured.lark_terminals import LarkTerminals, product_of_counts

MAX_FORCED_CHARS = 8192

_COUNT = re.compile(r"\{\s*(\d+)")
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')


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
    return max(len(pattern), product_of_counts(pattern, _COUNT)) <= MAX_FORCED_CHARS


def lark_forces_little(grammar: str) -> bool:
    """Terminals are weighed with those that they name, rules by their literals and regexes."""
    longest_literal = max((len(match[0]) for match in _LITERAL.finditer(grammar)), default=0)
    most_repeated = max(map(product_of_counts, grammar.splitlines()), default=0)
    longest_terminal = LarkTerminals(grammar).max_chars()
    return max(longest_literal, most_repeated, longest_terminal) <= MAX_FORCED_CHARS
