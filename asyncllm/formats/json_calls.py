"""Reads calls whose arguments are JSON, and passes the arguments on as the model writes them.

Members may come in any order: arguments before the name are kept until the name comes. An object
whose name is no tool is no call.
"""

from __future__ import annotations

import re

from asyncllm.formats.answer_format import JsonCall, NamedJson
from asyncllm.formats.cursor import NO_LIMIT, Reading
from asyncllm.formats.json_text import pass_value, read_string
from asyncllm.formats.open_call import OpenCall

# Other keys that a bare call may have; an object with further keys is no call.
_KNOWN_KEYS = ("type", "id", "index")
_NUMBER = re.compile(r":\d+$")


def read_json_call(call: OpenCall, body: JsonCall) -> Reading[bool]:
    """Read {"name": ..., "arguments": {...}}. False if it is no call, or an incomplete one, which
    may have begun."""
    cursor = call.cursor
    if not body.bare and not (yield from cursor.literals(("{",))):
        return False
    reader = _CallObject(call, body)
    while True:
        yield from cursor.spaces()
        key = yield from read_string(cursor)
        if key is None or not (yield from cursor.literals((":",))):
            return False
        yield from cursor.spaces()
        if not (yield from reader.read_member(key)):
            return False
        if (yield from cursor.literals(("}",))):
            return reader.finish()
        if not (yield from cursor.literal(",")):
            return False


class _CallObject:
    """The parts of a call that have been read."""

    def __init__(self, call: OpenCall, body: JsonCall) -> None:
        self._call = call
        self._body = body
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name

    def read_member(self, key: str) -> Reading[bool]:
        call = self._call
        if self._body.name_is_key and not call.begun:
            return call.may_be(key) and (yield from pass_arguments(call, key))
        if key in self._body.name_keys and self._name is None:
            self._name = yield from read_string(call.cursor)
            if self._name is None or not call.may_be(self._name):
                return False
            if self._early:
                call.begin(self._name)
                call.arguments("".join(self._early))
            return True
        if key in self._body.argument_keys and not call.begun and not self._early:
            if self._name is not None:
                return (yield from pass_arguments(call, self._name))
            is_object = (yield from call.cursor.peek()) == "{"
            return is_object and (yield from pass_value(call.cursor, self._early.append))
        if self._body.bare and key not in _KNOWN_KEYS and not call.begun:
            return False
        return (yield from pass_value(call.cursor, _ignore))

    def finish(self) -> bool:
        """Begin a call without arguments, unless the object may be other text."""
        call, name = self._call, self._name
        if not call.begun and name is not None and call.is_tool(name) and not self._body.bare:
            call.begin(name)
            call.arguments("{}")
        return call.begun


def read_named_json(call: OpenCall, body: NamedJson) -> Reading[bool]:
    """Read the name, then its arguments."""
    written = yield from call.read_name()
    name = written.removeprefix(body.prefix)
    if body.numbered and not call.is_tool(name):
        name = _NUMBER.sub("", name)
    if not call.may_be(name):
        return False
    call_id = written if body.numbered else None
    if body.id_begin and (yield from call.cursor.literals((body.id_begin,))):
        call_id = yield from call.read_name()
    has_end = yield from call.cursor.literals(body.name_end)
    yield from call.cursor.spaces()
    if not has_end and (yield from call.cursor.peek()) != "{":
        return False
    if not (yield from pass_arguments(call, name, call_id)):
        return False
    return (yield from call.cursor.literals(body.end))


def pass_arguments(call: OpenCall, name: str, call_id: str | None = None) -> Reading[bool]:
    """Read arguments: an object, an object as the text of a string, or null."""
    first = yield from call.cursor.peek()
    if first == "{":
        call.begin(name, call_id)
        return (yield from pass_value(call.cursor, call.arguments))
    if first == '"':
        text = yield from read_string(call.cursor, NO_LIMIT)
        if text is None or not text.lstrip().startswith("{"):
            return False
        call.begin(name, call_id)
        call.arguments(text)
        return True
    if not (yield from call.cursor.literal("null")):
        return False
    call.begin(name, call_id)
    call.arguments("{}")
    return True


def _ignore(text: str) -> None:
    """Drop the value of an unknown key."""
