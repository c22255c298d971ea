"""Reads calls whose arguments are literals, of Python or similar, and converts them to JSON.

Strings are streamed; numbers and constants are passed on as a whole. A comma is written before the
next item, so that a superfluous one does no harm.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass

from asyncllm.formats.answer_format import LiteralArguments
from asyncllm.formats.cursor import Cursor, Emit, Reading
from asyncllm.formats.json_text import MAX_KEY_CHARS
from asyncllm.formats.open_call import OpenCall
from asyncllm.formats.text_markers import text_markers
from asyncllm.formats.values import PYTHON, inside, quoted, refuse

MAX_WORD_CHARS = 512  # in a number

_KEY = re.compile(r"[\w\-]+")
_WORD = re.compile(r"[\w.+\-]+")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits of an escape


def read_literal_call(call: OpenCall, body: LiteralArguments) -> Reading[bool]:
    """Read a call. False if it is incomplete; open containers are closed then, unless the text has
    ended.

    A key without a value, and a word that is no value, are held.
    """
    cursor = call.cursor
    name = yield from call.read_name()
    if not call.may_be(name) or not (yield from cursor.literal(body.open)):
        return False
    call.begin(name)
    reader = _LiteralReader(cursor, body, call.arguments)
    is_whole = yield from reader.read_arguments()
    if not is_whole and not cursor.ended:
        reader.close_all()
    return is_whole


@dataclass(slots=True)
class _Container:
    """An open container: its closing text, that in JSON, and the separator of keys, if any."""

    closer: str
    json_closer: str
    assign: str = ""
    num_items: int = 0


class _LiteralReader:
    """Reads an argument list after its opening, and writes a JSON object."""

    def __init__(self, cursor: Cursor, body: LiteralArguments, emit: Emit) -> None:
        self._cursor = cursor
        self._body = body
        self._emit = emit
        self._open = [_Container(body.close, "}", body.assign)]  # innermost last
        emit("{")

    def close_all(self) -> None:
        self._emit("".join(container.json_closer for container in reversed(self._open)))

    def read_arguments(self) -> Reading[bool]:
        """Read items until the list is closed. Nested containers are read by the same loop."""
        while self._open:
            inner = self._open[-1]
            if (yield from self._cursor.literals((inner.closer,))):
                self._emit(self._open.pop().json_closer)
                continue
            if inner.num_items:
                if not (yield from self._cursor.literal(",")):
                    return False
                if (yield from self._cursor.literals((inner.closer,))):
                    self._emit(self._open.pop().json_closer)
                    continue
            if not (yield from self._read_item(inner)):
                return False
        return True

    def _read_item(self, inner: _Container) -> Reading[bool]:
        comma = ", " if inner.num_items else ""
        inner.num_items += 1
        if not inner.assign:
            return (yield from self._read_value(comma))
        self._cursor.hold()
        key = yield from self._read_key()
        if key is None or not (yield from self._cursor.literals((inner.assign,))):
            return False
        yield from self._cursor.spaces()
        self._cursor.let_go()
        return (yield from self._read_value(f"{comma}{quoted(key)}: "))

    def _read_key(self) -> Reading[str | None]:
        quote = yield from self._read_quote()
        if quote is None:
            return (yield from self._cursor.run(_KEY, MAX_KEY_CHARS)) or None
        parts: list[str] = []
        if not (yield from self._read_text(quote, parts.append)):
            return None
        text = json.loads(f'"{"".join(parts)}"')
        assert isinstance(text, str)
        return text

    def _read_value(self, before: str) -> Reading[bool]:
        """Read a value. before: written together with it, and not without a value."""
        char = yield from self._cursor.peek()
        if char in _CLOSERS:
            self._cursor.take(1)
            inner = _Container("}", "}", ":") if char == "{" else _Container(_CLOSERS[char], "]")
            self._emit(before + ("{" if char == "{" else "["))
            self._open.append(inner)
            return True
        quote = yield from self._read_quote()
        if quote is not None:
            self._emit(before + '"')
            is_whole = yield from self._read_text(quote, self._emit)
            self._emit('"' if is_whole or not self._cursor.ended else "")
            return is_whole
        self._cursor.hold()
        word = yield from self._cursor.run(_WORD, MAX_WORD_CHARS)
        value = PYTHON.get(word, word)
        if not _is_json(value) or (self._cursor.ended and self._cursor.is_empty):
            return False
        self._cursor.let_go()
        self._emit(before + value)
        return True

    def _read_quote(self) -> Reading[str | None]:
        for quote in self._body.quotes:
            if (yield from self._cursor.literal(quote)):
                return quote
        return None

    def _read_text(self, quote: str, emit: Emit) -> Reading[bool]:
        """Read up to the closing quote; emits the contents of a JSON string."""
        if len(quote) > 1:
            markers = text_markers(quote)
            found = yield from self._cursor.until(
                markers, lambda text: emit(inside(text)), max_spaces=0, keeps_half=False
            )
            return found is not None
        while True:
            yield from self._cursor.feed(_PLAIN[quote], lambda text: emit(inside(text)))
            if (yield from self._cursor.literal(quote)):
                return True
            if not (yield from self._cursor.has(2)):
                return False
            self._cursor.take(1)
            emit((yield from self._read_escape(self._cursor.take(1))))

    def _read_escape(self, char: str) -> Reading[str]:
        num_digits = _CODES.get(char)
        if num_digits is None:
            return inside(_ESCAPES.get(char, f"\\{char}"))
        yield from self._cursor.has(num_digits)
        digits = yield from self._cursor.run(_HEX_DIGITS[num_digits], 0)
        if len(digits) != num_digits or int(digits, 16) > sys.maxunicode:
            return inside(f"\\{char}{digits}")
        code = int(digits, 16)
        # Surrogates stay escaped: alone they are no character.
        return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else inside(chr(code))


_HEX_DIGITS = {n: re.compile(f"[0-9a-fA-F]{{{n}}}") for n in _CODES.values()}


def _is_json(word: str) -> bool:
    try:
        json.loads(word, parse_constant=refuse)
    except ValueError:
        return False
    return True
