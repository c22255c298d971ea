"""Reads strings in streamed JSON, and passes values on as they are written.

Values are parsed only as far as is necessary to find their ends: strings, brackets, and characters
that JSON does not allow outside of strings. They may be invalid JSON otherwise.
"""

from __future__ import annotations

import json
import re

from asyncllm.formats.cursor import NO_LIMIT, Cursor, Emit, Reading

MAX_KEY_CHARS = 1024  # in a key or a name

_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)
_OUTSIDE = re.compile(r"[\s\w:,.+\-]*")
_SCALAR = re.compile(r"[\w.+\-]*")


def read_string(cursor: Cursor, limit: int = MAX_KEY_CHARS) -> Reading[str | None]:
    """Read a string. None if there is none, if it has no end, or more than `limit` characters."""
    if not (yield from cursor.literal('"')):
        return None
    parts: list[str] = []
    yield from _pass_text(cursor, parts.append, limit)
    if not (yield from cursor.literal('"')):
        return None
    try:
        decoded = json.loads(f'"{"".join(parts)}"', strict=False)
    except ValueError:
        return None
    assert isinstance(decoded, str)
    return decoded


def pass_value(cursor: Cursor, emit: Emit) -> Reading[bool]:
    """Pass one value on. False if it is none, or incomplete; what was read is passed on then."""
    first = yield from cursor.peek()
    if first == '"':
        return (yield from _pass_string(cursor, emit))
    if first in ("{", "["):
        return (yield from _pass_brackets(cursor, emit))
    scalar = yield from cursor.run(_SCALAR)
    emit(scalar)
    return bool(scalar)


def _pass_brackets(cursor: Cursor, emit: Emit) -> Reading[bool]:
    depth = 0
    while True:
        yield from cursor.feed(_OUTSIDE, emit)
        char = yield from cursor.peek()
        if char == '"':
            if not (yield from _pass_string(cursor, emit)):
                return False
        elif char in ("{", "["):
            emit(cursor.take(1))
            depth += 1
        elif char in ("}", "]"):
            emit(cursor.take(1))
            depth -= 1
            if depth == 0:
                return True
        else:
            return False


def _pass_string(cursor: Cursor, emit: Emit) -> Reading[bool]:
    emit(cursor.take(1))
    yield from _pass_text(cursor, emit)
    if (yield from cursor.peek()) != '"':
        return False
    emit(cursor.take(1))
    return True


def _pass_text(cursor: Cursor, emit: Emit, limit: int = NO_LIMIT) -> Reading[None]:
    """Pass on a string up to its closing quote, the end of the text, or past `limit`."""
    length = 0
    while length <= limit:
        length += yield from cursor.feed(_IN_STRING, emit, limit - length)
        if (yield from cursor.peek()) != "\\":
            return
        if not (yield from cursor.has(2)):  # the text ends after the backslash
            emit(cursor.take(1))
            return
