"""Regular expressions for unquoted text that satisfies the JSON schema of a string.

(In JSON strings llguidance enforces these keywords itself.) Lengths count code points, as in JSON
schema. A pattern may match anywhere in the text, unless it is anchored; `\\d`, `\\w` and `\\s`
match ASCII only. Keywords that cannot be expressed raise a `ValueError` that names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from asyncllm.formats.text_formats import ANNOTATIONS, TEXT_FORMATS

TEXT_KEYWORDS = frozenset({"pattern", "format", "minLength", "maxLength"})
ANYTHING = "(?s:.*)"
_NO_MATCH_ALONE = frozenset("bBkAzZ123456789")  # after a backslash: positions, and back-references


def text_regexes(schema: Mapping[str, Any]) -> list[str]:
    """Regexes that the whole text must match. Raises `ValueError`."""
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
    """Whether it is a str without lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def searching(pattern: object) -> str:
    """A regex for all texts that contain a match of `pattern`. Raises `ValueError`."""
    if not is_unicode(pattern):
        raise ValueError("pattern")
    return "|".join(map(_anywhere, _branches(pattern)))


def _anywhere(branch: list[str]) -> str:
    """A branch that may match anywhere. Anchors are allowed at its two ends only."""
    begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
    inner = branch[begins : len(branch) - ends]
    if "^" in inner or "$" in inner:
        raise ValueError("pattern")
    before, after = "" if begins else ANYTHING, "" if ends else ANYTHING
    return f"{before}(?:{''.join(inner)}){after}"


def _branches(pattern: str) -> Iterator[list[str]]:
    """The tokens of each top-level alternative."""
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
    """Characters, escapes, classes and "(?:" as tokens. Raises `ValueError`."""
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
            if not pattern.startswith("(?:", at):  # look-around, or not of JSON schema
                raise ValueError("pattern")
            length = 3
        yield pattern[at : at + length]
        at += length


def _class_length(pattern: str, start: int) -> int:
    """The length of a character class. In Rust, a bracket in it begins a nested class, and "&&"
    intersects."""
    at = start + (2 if pattern.startswith("[^", start) else 1)
    if pattern[at : at + 1] == "]":  # an empty class here, a member in Rust
        raise ValueError("pattern")
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "[" or pattern[at : at + 2] in ("&&", "--", "~~"):
            raise ValueError("pattern")
        at += 2 if pattern[at] == "\\" else 1
    if at >= len(pattern):
        raise ValueError("pattern")
    return at + 1 - start
