"""Reading costs the length of the text, whatever is in it and however it is cut."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from asyncllm.formats.cursor import Cursor
from asyncllm.formats.events import Content
from asyncllm.formats.parser import FormatParser
from tests.formats.answers import CLOCK, MANY, TOOLS, read
from tests.formats.test_families import model_format

LENGTH = 100_000
BEGIN = '<tool_call>{"name": "clock", "arguments": '
HOSTILE = {
    "hermes": ["<", "<tool_call>", "<tool_cal", '<tool_call>{"a": ', "{", " ", "\n<", BEGIN],
    "hermes in arguments": ["{", "[", '"', "\\", '"\\"', "{}", "9", '{"a":[', " "],
    "hermes before the name": ['[{"', "9", "\\u0061", "{"],
    "qwen3_coder": ["<function=clock>", "<function=", "<parameter=a>\n", "</param", "\n"],
    "qwen3_coder in arguments": ["<", "</parameter", "\n</p", "[", "9", "<parameter=items>"],
    "pythonic": ["[clock(", "[", "clock(a=", "'"],
    "pythonic in arguments": ["[", "'", "\\x4", "'a',", "{'a':", "1", "(", " ", "a="],
    "llama3_json": ["{", '{"name": "clock", ', '{"type": ', ";"],
    "xlam": ["[", "[{", "```json", "[TOOL_", "[TOOL_CALLS]"],
    "openai": ["<|channel|>", "<|start|>", "<|message|>", "<|end|>", "to=functions.clock", "<|"],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_calls_section_begin|>", "functions.", "<|tool_"],
    "gemma4": ["<|tool_call>call:clock{", "a:<|", '<|"|>', "<|tool"],
}
BEFORE = {
    "hermes in arguments": BEGIN,
    "hermes before the name": '<tool_call>{"arguments": {"a": ',
    "qwen3_coder in arguments": "<function=many-types.v2><parameter=items>",
    "pythonic in arguments": "[clock(a=[",
}
CASES = [(name, unit) for name, units in HOSTILE.items() for unit in units]


def num_calls(name: str, text: str, piece: int) -> int:
    """How many functions reading it calls, those of the library in C included."""
    parser = model_format(name.split(" ")[0]).parser((CLOCK, MANY))
    pieces = [text[i : i + piece] for i in range(0, len(text), piece)]
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for each in pieces:
            parser.push(each)
        parser.close()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("name", "unit"), CASES)
def test_twice_the_text_is_twice_the_work(name: str, unit: str) -> None:
    size = LENGTH // 40
    for piece in (7, size * 2):
        work = [
            num_calls(name, BEFORE.get(name, "") + unit * (length // len(unit)), piece)
            for length in (size, size * 2)
        ]
        assert work[1] <= 2.2 * work[0] + 200


@pytest.mark.slow
@pytest.mark.parametrize(("name", "unit"), CASES)
def test_what_is_kept_unread_is_short(
    name: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that joining the next piece to it costs no more than the piece."""
    longest = 0
    push = Cursor.push

    def measured(cursor: Cursor, text: str) -> None:
        nonlocal longest
        push(cursor, text)
        longest = max(longest, len(cursor._text))

    monkeypatch.setattr(Cursor, "push", measured)
    text = BEFORE.get(name, "") + unit * (LENGTH // 4 // len(unit))
    parser = model_format(name.split(" ")[0]).parser((CLOCK, MANY))
    for i in range(0, len(text), 10):
        parser.push(text[i : i + 10])
    parser.close()
    assert longest < 200


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name.split(" ")[0] for name in HOSTILE}))
def test_a_large_text_of_everything_hostile(name: str) -> None:
    units = [unit for key, units in HOSTILE.items() if key.startswith(name) for unit in units]
    text = "".join(units) * (LENGTH // sum(map(len, units)))
    answers = [
        read(lambda: model_format(name).parser(TOOLS), pieces)
        for pieces in ([text], [text[i : i + 9] for i in range(0, len(text), 9)])
    ]
    assert answers[0].told() == answers[1].told()


def test_plain_text_is_one_look_and_one_event() -> None:
    parser = model_format("hermes", "qwen3").parser(TOOLS)
    assert isinstance(parser, FormatParser)
    parser.push("Begun")
    parser._run = iter([])  # type: ignore[assignment]  # whose first step would raise
    for piece in (" The", " answer,", " 42", "."):
        assert parser.push(piece) == [Content(piece)]
