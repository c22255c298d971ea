"""Reads calls with arguments between tags; they become JSON by the types in the tool's schema."""

from __future__ import annotations

import re

from asyncllm.formats.answer_format import TaggedArguments
from asyncllm.formats.cursor import Cursor, Emit, Reading
from asyncllm.formats.json_text import MAX_KEY_CHARS
from asyncllm.formats.open_call import OpenCall
from asyncllm.formats.text_markers import TextMarkers, text_markers
from asyncllm.formats.values import STRING, inside, json_of, quoted

_KEY = re.compile(r'[^<>"\n]+')


def read_tagged_call(call: OpenCall, body: TaggedArguments) -> Reading[bool]:
    """Read a call. False if it is incomplete; its arguments are closed then, unless the text has
    ended. An argument's name is held until its value comes.
    """
    cursor = call.cursor
    name = yield from call.read_name()
    if not call.may_be(name) or not (yield from cursor.literals(body.name_end)):
        return False
    if call.is_tool(name):  # a call of an unknown tool begins with its first argument, or its end
        call.begin(name)
    value_end = text_markers(body.value_end)
    opener = "{"
    while True:
        if call.begun:
            cursor.hold()
        if not (yield from cursor.literals((body.key_begin,))):
            break
        key = (yield from cursor.run(_KEY, MAX_KEY_CHARS)).strip()
        types = call.argument_types(name, key)
        if body.string_key_end and (yield from cursor.literals(body.string_key_end)):
            types = STRING
        elif not (yield from cursor.literals(body.key_end)):
            break
        elif body.string_key_end and types != STRING:
            types -= STRING  # after this marker strings are JSON, with quotes
        _let_go(call, name)
        before = f"{opener}{quoted(key)}: "
        opener = ", "
        if not (yield from _pass_value(call, before, types, value_end, body.lines)):
            return False
    is_whole = yield from cursor.literals(body.end)
    if is_whole:
        _let_go(call, name)
    if call.begun and (is_whole or not cursor.ended):
        call.arguments("{}" if opener == "{" else "}")
    return is_whole


def _let_go(call: OpenCall, name: str) -> None:
    if call.begun:
        call.cursor.let_go()
    else:
        call.begin(name)


def _pass_value(
    call: OpenCall, before: str, types: frozenset[str], value_end: TextMarkers, lines: bool
) -> Reading[bool]:
    """Pass a value on. Strings are streamed; values to be converted wait for their end."""
    if types == STRING:
        call.arguments(before + '"')
        if not (yield from _pass_text(call.cursor, _escaping(call), value_end, lines)):
            return False
        call.arguments('"')
        return True
    parts: list[str] = []
    if not (yield from _pass_text(call.cursor, parts.append, value_end, lines)):
        return False
    call.arguments(before + json_of("".join(parts), types))
    return True


def _pass_text(cursor: Cursor, emit: Emit, value_end: TextMarkers, lines: bool) -> Reading[bool]:
    if lines:
        yield from cursor.literal("\n")
    found = yield from cursor.until(value_end, emit, 1 if lines else 0, keeps_half=False)
    if found is None:
        return False
    gap = found[0]
    if gap != "\n":
        emit(gap)
    return True


def _escaping(call: OpenCall) -> Emit:
    return lambda text: call.arguments(inside(text))
