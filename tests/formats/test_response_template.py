"""Formats that tokenizers declare, in transformers' words."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.formats import resolve
from asyncllm.formats.answer_format import ReasoningMarks
from asyncllm.formats.families import TOOL_PARSERS
from asyncllm.formats.response_template import read_response_template
from tests.formats.answers import read_in_all_cuts
from tests.formats.test_families import CALLS

THINK = {"open": "<think>", "close": "</think>", "content": "text"}
AS_IS = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(calls: dict[str, Any] | None, reasoning: dict[str, Any] | None = THINK) -> Any:
    fields: dict[str, Any] = {"content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"}}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls:
        fields["tool_calls"] = {"repeats": True, **calls}
    return {"start_anchor": "<|im_start|>assistant\n", "fields": fields}


# transformers' own, of Qwen 3, Qwen 3.5 and Gemma 4; and one with a name before JSON
KNOWN: dict[str, dict[str, Any]] = {
    "hermes": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "transform": AS_IS,
    },
    "qwen3_coder": {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": NAMED,
    },
    "gemma4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    },
    "deepseek_v31": {
        "open_pattern": r"(?:<x>)?<｜tool▁call▁begin｜>(?P<name>\w+)<｜tool▁sep｜>",
        "close": "<｜tool▁call▁end｜>",
        "content": "json",
        "transform": NAMED,
    },
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_calls_are_read_by_it(name: str) -> None:
    found = resolve(None, response_template=template(KNOWN[name]))
    assert found is not None and found.reasoning == ReasoningMarks("<think>", "</think>")
    for text, calls in CALLS[name]:
        if text.startswith("<function="):
            continue
        answer = read_in_all_cuts(found, f"<think>\nHm.\n</think>\n\n{text}")
        assert (answer.parsed_calls, answer.reasoning, answer.content) == (calls, "Hm.", "")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_a_family_that_it_means_is_known_better(name: str) -> None:
    shown = CALLS[name][0][0]  # as a chat template would show it
    found = resolve(shown, response_template=template(KNOWN[name]))
    assert found is not None and found.format.calls == TOOL_PARSERS[name].calls


def test_it_goes_before_the_chat_template_and_behind_the_flags() -> None:
    declared = template({**KNOWN["hermes"], "open_pattern": "<call>", "close": "</call>"})
    found = resolve("<tool_call></think>", response_template=declared)
    assert found is not None and found.format.calls[0].call_begin == ("<call>",)
    by_flag = resolve(
        None, tool_parser="glm45", reasoning_parser="none", response_template=declared
    )
    assert by_flag is not None and by_flag.format.calls == TOOL_PARSERS["glm45"].calls
    assert by_flag.reasoning is None


@pytest.mark.parametrize(
    "declared",
    [
        None,
        5,
        {},
        {"fields": []},
        {"fields": {"tool_calls": 5, "reasoning": {"open": 5}}},
        template(KNOWN["deepseek_v31"], None),
        template({**KNOWN["hermes"], "transform": NAMED}, None),
        template({**KNOWN["hermes"], "content": "kv-lines"}, None),
        template({"open": "", "close": "</x>", "content": "json", "transform": AS_IS}, None),
        template({**KNOWN["hermes"], "open_pattern": r"<[a-z]+>"}, None),
        template({**KNOWN["hermes"], "open_pattern": r"<\d>"}, None),
    ],
)
def test_what_is_not_understood(declared: Any) -> None:
    assert read_response_template(declared) is None
    found = resolve("<tool_call>", response_template=declared)
    assert found is not None and found.format.calls == TOOL_PARSERS["hermes"].calls
