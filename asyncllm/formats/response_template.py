"""Reads the format that a tokenizer declares: transformers' `response_template`.

It defines the parts of a message by texts or patterns that open and close them. Parts that fit our
records are used: reasoning, and calls whose patterns consist of texts, white space and one name.
Otherwise the format is detected from the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncllm.formats.answer_format import (
    AnswerFormat,
    CallBody,
    CallSyntax,
    JsonCall,
    LiteralArguments,
    Markers,
    NamedJson,
    ReasoningMarks,
    TaggedArguments,
)

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_GAP = re.compile(r"\\s[*+]\??")
_GROUP = re.compile(r"\(\?P<\w+>(?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)*\])*\)")
_VALUE_AFTER_GAP = re.compile(r"\\s\*\(\?P<value>")
_META = re.compile(r"[.^$*+?{}\[\]|()]")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t"}


def read_response_template(template: object) -> AnswerFormat | None:
    """The declared format; None if there is none, or no part of it fits."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    marks, calls = _reasoning(reasoning), _calls(fields.get("tool_calls"))
    if marks is None and calls is None:
        return None
    return AnswerFormat(marks, (calls,) if calls else ())


def _reasoning(field: object) -> ReasoningMarks | None:
    begin, end = _anchor(field, "open"), _anchor(field, "close")
    if begin is None or end is None or len(begin) != 1 or len(end) != 1:
        return None
    return ReasoningMarks("".join(begin[0]), "".join(end[0]))


def _calls(field: object) -> CallSyntax | None:
    """The syntax of calls, if each match of the field is one call."""
    begin, end = _anchor(field, "open"), _anchor(field, "close")
    if begin is None or end is None or len(end) != 1 or not begin[0]:
        return None
    assert isinstance(field, Mapping)
    if len(begin) == 1:
        whole = {"type": "function", "function": "{content}"}
        if field.get("content") != "json" or field.get("transform") != whole:
            return None
        return CallSyntax(JsonCall(), call_begin=begin[0], call_end=end[0])
    body = _named_body(field, begin[1])
    if isinstance(body, NamedJson | TaggedArguments):
        return CallSyntax(replace(body, end=end[0]), call_begin=begin[0])
    return CallSyntax(body, call_begin=begin[0], call_end=end[0]) if body else None


def _named_body(field: Mapping[str, Any], name_end: Markers) -> CallBody | None:
    """The body without the end of the call. name_end: the text between name and arguments."""
    options = field.get("content_args") or {}
    if field.get("content") == "xml-inline":
        pattern = str(options.get("tag_pattern"))
        parts = _pieces(pattern)
        if parts is None or len(parts) != 3 or len(parts[0]) != 1 or len(parts[2]) != 1:
            return None
        lines = _VALUE_AFTER_GAP.search(pattern) is not None
        return TaggedArguments(name_end, parts[0][0], parts[1], parts[2][0], (), lines=lines)
    if field.get("content") != "json":
        return None
    quotes = options.get("string_delims")
    if not options.get("unquoted_keys") and not quotes:
        return NamedJson(name_end)
    if name_end or not all(begin == close for begin, close in quotes or ()):
        return None
    # The braces belong to the object.
    return LiteralArguments("{", ":", "}", ",", (*(begin for begin, _ in quotes or ()), '"'))


def _anchor(field: object, name: str) -> list[Markers] | None:
    """The texts before, between and after names in the opening or closing of a field."""
    if not isinstance(field, Mapping):
        return None
    literal, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(literal, list) and literal:
        literal = literal[0]
    if isinstance(literal, str):
        return [(literal,)] if literal.strip() else None
    return _pieces(pattern) if isinstance(pattern, str) else None


def _pieces(pattern: str) -> list[Markers] | None:
    """The texts of a pattern between its groups; None if it has more than texts and gaps."""
    parts: list[Markers] = []
    for part in _GROUP.split(pattern):
        texts = []
        for text in filter(None, _GAP.split(part)):
            bare = _ESCAPED.sub("", text)
            if _META.search(bare) or any(c.isalnum() and c not in _ESCAPES for c in _escapes(text)):
                return None
            texts.append(_ESCAPED.sub(lambda match: _ESCAPES.get(match[1], match[1]), text))
        parts.append(tuple(texts))
    return parts


def _escapes(text: str) -> list[str]:
    return _ESCAPED.findall(text)
