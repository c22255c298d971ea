"""Hermes' calls with <think>: the format of most families, and of the built-in model."""

from __future__ import annotations

import json

import pytest

from asyncllm.formats import ModelFormat, resolve
from tests.formats.answers import Answer, read_in_all_cuts

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def hermes() -> ModelFormat:
    found = resolve(None, tool_parser="hermes", reasoning_parser="qwen3")
    assert found is not None
    return found


def read(text: str, prompt: str = "") -> Answer:
    return read_in_all_cuts(hermes(), text, prompt)


def test_a_call() -> None:
    answer = read(CALL)
    assert answer.told() == ("", "", [["get_weather", '{"city": "Oslo"}']])
    assert answer.ids[0].startswith("call_") and len(answer.ids[0]) == 29


def test_reasoning_content_and_two_calls() -> None:
    text = f"<think>\nI need it.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
    answer = read(text)
    assert answer.reasoning == "I need it."
    assert answer.content == "Let me look."
    assert answer.parsed_calls == [("get_weather", {"city": "Oslo"})] * 2
    assert len(set(answer.ids)) == 2


def test_text_after_a_call() -> None:
    assert read(f"{CALL}\nThat is all.\n").content == "That is all.\n"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": "</tool_call>", "unit": '"}}\n</tool_call>'},
        {"city": "\\", "unit": 'a\\"b\n\t{[]}'},
        {"city": "Zürich 北京 🦊", "unit": "\u2028"},
        {"a": {"b": [{"c": [1, -2.5e3, None, True]}, []]}, "d": "x"},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_arguments_arrive_as_written(arguments: dict[str, object], ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    answer = read(f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>')
    assert answer.told() == ("", "", [["get_weather", written]])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"city": "Oslo"}, "name": "get_weather"}', '{"city": "Oslo"}'),
        ('{"name": "get_weather", "parameters": {"city": 1}}', '{"city": 1}'),
        ('{"id": 7, "name": "get_weather", "more": [{}], "arguments": {}}', "{}"),
        ('{"name": "get_weather"}', "{}"),
        ('{"name": "get_weather", "arguments": null}', "{}"),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', '{"city": "Oslo"}'),
        ('{"na\\u006de": "get\\u005fweather", "arguments": {}}', "{}"),
    ],
)
def test_ways_to_write_the_object(call: str, arguments: str) -> None:
    answer = read(f"<tool_call>{call}</tool_call>")
    assert answer.told() == ("", "", [["get_weather", arguments]])


@pytest.mark.parametrize(
    "text",
    [
        "a < b, a <tool, </tool_call> and </think>.",
        "say <tool_call> to call",
        "<tool_call>\n{broken}\n</tool_call>",
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "no such tool", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}, "name": ""}\n</tool_call>',
        '<tool_call>\n{"name": "no_such_tool"}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": 5}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "argum',
        "  \n<tool_ca",
        "I wrote <think> here </think>",
        " \n ",
        "",
    ],
)
def test_what_only_looks_like_a_call_stays_text(text: str) -> None:
    assert read(text).told() == (text, "", [])


def test_a_call_after_one_that_was_none() -> None:
    answer = read(f"<tool_call>oops {CALL}")
    assert answer.told() == ("<tool_call>oops", "", [["get_weather", '{"city": "Oslo"}']])


def test_arguments_that_break_off_end_where_they_do() -> None:
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": <no>}}</tool_call> ok'
    answer = read(broken)
    assert answer.calls == [["get_weather", '{"city": ']]
    assert answer.content == "<no>}} ok"


def test_a_missing_brace_does_no_harm() -> None:
    answer = read(f'<tool_call>{{"name": "clock", "arguments": {{}}\n</tool_call>\n{CALL}')
    assert answer.calls == [["clock", "{}"], ["get_weather", '{"city": "Oslo"}']]
    assert answer.content == ""


def test_a_truncated_call_is_what_came_of_it() -> None:
    answer = read('Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os')
    assert answer.told() == ("Hm.", "", [["get_weather", '{"city": "Os']])


def test_reasoning_that_the_prompt_opened() -> None:
    answer = read("So.\n</think>\n\nYes.", prompt="<|im_start|>assistant\n<think>\n")
    assert answer.told() == ("Yes.", "So.", [])


def test_reasoning_that_the_prompt_closed() -> None:
    answer = read("Yes </think>", prompt="assistant\n<think>\n\n</think>\n\n")
    assert answer.told() == ("Yes </think>", "", [])


def test_reasoning_without_end() -> None:
    assert read("<think>So <tool_call> it").told() == ("", "So <tool_call> it", [])


def test_without_tools_nothing_is_a_call() -> None:
    answer = read_in_all_cuts(hermes(), f"<think>a</think>{CALL}", tools=())
    assert answer.told() == (CALL, "a", [])


def test_pieces_of_plain_text_come_at_once() -> None:
    parser = hermes().parser()
    assert [len(parser.push(piece)) for piece in ("The", " answer", " is", " 42", ".")] == [1] * 5
