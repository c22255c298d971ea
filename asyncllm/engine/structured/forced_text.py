"""Decides whether a grammar may force a long text.

If only one text can follow, llguidance determines all of it before it returns the next token: fast
for the name of a property, but nearly a second for `a{1000000}`, in each step. So a grammar with a
terminal that may force more than `MAX_FORCED_CHARS` is compiled without forcing; its tokens are
sampled one by one. (llguidance itself limits the forced text of many terminals.)
The lengths are estimated from the grammar's text, and are upper bounds.
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
    """The size of a terminal includes those that it names; rules count by literals and regexes."""
    longest_literal = max((len(match[0]) for match in _LITERAL.finditer(grammar)), default=0)
    most_repeated = max(map(product_of_counts, grammar.splitlines()), default=0)
    longest_terminal = LarkTerminals(grammar).max_chars()
    return max(longest_literal, most_repeated, longest_terminal) <= MAX_FORCED_CHARS
