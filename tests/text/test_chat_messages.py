"""Chat messages as templates want them: strings or parts, and the spellings that clients have."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.engine.text.chat_messages import normalize_messages
from asyncllm.engine.text.content_format import detect_content_format
from asyncllm.errors import InvalidRequestError

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def one(message: dict[str, Any], as_parts: bool = False) -> dict[str, Any]:
    (result,) = normalize_messages([message], as_parts)
    return result


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("one", "one", PARTS[:1]),
        (PARTS, "one\ntwo", PARTS),
        (["one", {"type": "refusal", "refusal": "two"}], "one\ntwo", PARTS),
        (None, "", []),
        ([], "", []),
    ],
)
def test_content_as_text_and_as_parts(content: Any, text: str, parts: Any) -> None:
    message = {"role": "user" if content is not None else "assistant", "content": content}
    assert one(message)["content"] == text
    assert one(message, as_parts=True)["content"] == parts
    assert message["content"] is content


def test_the_deprecated_form_of_a_call_becomes_the_new_one() -> None:
    called = {"name": "f", "arguments": '{"a": 1}'}
    message = one({"role": "assistant", "content": None, "function_call": called})
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert "function_call" not in message
    assert one({"role": "function", "name": "f", "content": "1"})["role"] == "tool"
    with pytest.raises(InvalidRequestError):
        one({"role": "assistant", "function_call": "f"})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_names_that_templates_know(name: str) -> None:
    message = one({"role": "assistant", "content": "Yes", name: "Hm"})
    assert message["reasoning"] == message["reasoning_content"] == "Hm"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "string"),
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", "openai"),
        ("{% for p in messages[0]['content'] %}{{ p }}{% endfor %}", "openai"),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}", "openai"),
        ("{% macro t(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}", "openai"),
        ("{% for w in messages[0].content.split() %}{{ w }}{% endfor %}", "string"),
        ("{% for m in messages %}{% break %}{% endfor %}", "string"),
        ("{% nonsense", "string"),
        ("", "string"),
    ],
)  # fmt: skip
def test_what_a_template_takes(template: str, expected: str) -> None:
    assert detect_content_format(template) == expected


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("fields", [{}, {"content": None}])
def test_who_asks_must_say_something(role: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] of role .* must have content"):
        one({"role": role, **fields})
