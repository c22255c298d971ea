"""`tools` and `tool_choice` of a request: what they mean, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.errors import InvalidRequestError
from asyncllm.formats.tools import (
    MAX_SCHEMA_BYTES,
    MAX_TOOLS,
    ToolChoice,
    parse_tool_choice,
    parse_tools,
)


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = parse_tools([function("a"), function("b"), function("c")])


def test_a_tool() -> None:
    schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    plain, strict = parse_tools(
        [function("a.b-c_1"), function("g", parameters=schema, strict=True)]
    )
    assert (plain.name, plain.strict) == ("a.b-c_1", False)
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert plain.parameters == nothing, "a function without parameters takes none"
    assert strict.parameters == {"type": "object", **schema} and strict.strict
    assert strict.param == "tools[1].function.parameters"
    assert parse_tools(None) == parse_tools([]) == ()


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ([5], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([function(5)], "tools[0].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("a b")], "tools[0].function.name"),
        ([function("a\n")], "tools[0].function.name"),
        ([function("é")], "tools[0].function.name"),
        ([function("a" * 65)], "tools[0].function.name"),
        ([function("a"), function("a")], "tools[1].function.name"),
        ([function(strict="yes")], "tools[0].function.strict"),
        ([function(parameters=[])], "tools[0].function.parameters"),
        ([function(parameters=True)], "tools[0].function.parameters"),
        ([function(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([function(parameters={"type": ["object"]})], "tools[0].function.parameters"),
        ([function(parameters={"properties": 5})], "tools[0].function.parameters"),
        ([function(parameters={"title": "x" * MAX_SCHEMA_BYTES})], "tools"),
        ([function(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
    ],
)
def test_refused_tools(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_as_many_as_are_allowed() -> None:
    assert len(parse_tools([function("a" * 64 if i == 0 else f"f{i}") for i in range(128)])) == 128


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, ToolChoice(TOOLS)),
        ("auto", ToolChoice(TOOLS)),
        ("none", ToolChoice()),
        ("required", ToolChoice(TOOLS, required=True)),
        (named("b"), ToolChoice(TOOLS[1:2], required=True)),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [named("c"), named("a")]}},
            ToolChoice((TOOLS[0], TOOLS[2]), only_these=True),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": None, "tools": [named("c")]}},
            ToolChoice(TOOLS[2:], only_these=True),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [named("b"), named("b")]},
            },
            ToolChoice(TOOLS[1:2], required=True, only_these=True),
        ),
    ],
)
def test_tool_choice(choice: Any, meant: ToolChoice) -> None:
    assert parse_tool_choice(choice, TOOLS) == meant


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        (5, "tool_choice"),
        ({}, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "function", "function": {}}, "tool_choice"),
        (named("d"), "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": []}},
            "tool_choice.allowed_tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [named("a"), named("d")]}},
            "tool_choice.allowed_tools.tools[1]",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [named("a")]}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "", "tools": [named("a")]}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [named("a")] * 129}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_refused_choices(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tool_choice(choice, TOOLS)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("choice", ["auto", "required", named("a"), 5, {}])
def test_a_choice_without_tools(choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match="tool_choice needs tools"):
        parse_tool_choice(choice, ())


def test_no_choice_without_tools() -> None:
    assert parse_tool_choice(None, ()) == parse_tool_choice("none", ()) == ToolChoice()
