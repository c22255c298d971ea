"""A JSON schema of a string as regular expressions for the text as it stands between tags.

In a JSON string llguidance keeps to these keywords itself. Lengths count code points, as JSON
schema's do. A pattern may match anywhere in the text, unless it is anchored; `\\d`, `\\w` and `\\s`
are those of ASCII. An inexpressible keyword is a `ValueError` that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from asyncllm.formats.text_formats import ANNOTATIONS, TEXT_FORMATS

TEXT_KEYWORDS = frozenset({"pattern", "format", "minLength", "maxLength"})
ANYTHING = "(?s:.*)"
_NO_MATCH_ALONE = frozenset("bBkAzZ123456789")  # after a backslash: places, and earlier groups


def text_regexes(schema: Mapping[str, Any]) -> list[str]:
    """The whole text must match each. Raises `ValueError`."""
    found = []
    if "minLength" in schema or "maxLength" in schema:
        found.append(_length(schema))
    if "pattern" in schema:
        found.append(searching(schema["pattern"]))
    if "format" in schema and schema["format"] not in ANNOTATIONS:
        name = schema["format"]
        if not isinstance(name, str) or name not in TEXT_FORMATS:
            raise ValueError("format")
        found.append(TEXT_FORMATS[name])
    return found


def _length(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for keyword, value in (("minLength", least), ("maxLength", most)):
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(keyword)
    if most is not None and most < least:
        raise ValueError("maxLength")
    return f"(?s:.{{{least},{'' if most is None else most}}})"


def is_unicode(value: object) -> TypeGuard[str]:
    """A text without lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def searching(pattern: object) -> str:
    """A regex for all texts in which `pattern` is found. Raises `ValueError`."""
    if not is_unicode(pattern):
        raise ValueError("pattern")
    return "|".join(map(_anywhere, _branches(pattern)))


def _anywhere(branch: list[str]) -> str:
    """Anchors may only stand at the two ends of a branch."""
    begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
    inner = branch[begins : len(branch) - ends]
    if "^" in inner or "$" in inner:
        raise ValueError("pattern")
    before, after = "" if begins else ANYTHING, "" if ends else ANYTHING
    return f"{before}(?:{''.join(inner)}){after}"


def _branches(pattern: str) -> Iterator[list[str]]:
    """The tokens of each alternative at the top."""
    depth, branch = 0, list[str]()
    for token in _tokens(pattern):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token == "|" and not depth:
            yield branch
            branch = []
        else:
            branch.append(token)
    yield branch


def _tokens(pattern: str) -> Iterator[str]:
    """Characters, escapes, whole classes; "(?:" is one. Raises `ValueError`."""
    at = 0
    while at < len(pattern):
        length = 1
        if pattern[at] == "\\":
            length = 2
            if pattern[at + 1 : at + 2] in _NO_MATCH_ALONE or at + 1 == len(pattern):
                raise ValueError("pattern")
        elif pattern[at] == "[":
            length = _class_length(pattern, at)
        elif pattern.startswith("(?", at):
            if not pattern.startswith("(?:", at):  # looks around, or is no JSON schema's
                raise ValueError("pattern")
            length = 3
        yield pattern[at : at + length]
        at += length


def _class_length(pattern: str, start: int) -> int:
    """The length of a character class. In Rust's a bracket begins another, "&&" intersects."""
    at = start + (2 if pattern.startswith("[^", start) else 1)
    if pattern[at : at + 1] == "]":  # here it is the class's end, there a member
        raise ValueError("pattern")
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "[" or pattern[at : at + 2] in ("&&", "--", "~~"):
            raise ValueError("pattern")
        at += 2 if pattern[at] == "\\" else 1
    if at >= len(pattern):
        raise ValueError("pattern")
    return at + 1 - start
