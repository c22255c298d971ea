"""An argument's text between tags, as JSON by its type."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.formats.values import json_of, resolved, types_of


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        (" 5 ", {"type": "number"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("5.5", {"type": "integer"}, "5.5"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("[1", {"type": "array"}, "[1"),
        ("[1]", {}, [1]),
        ("plain", {}, "plain"),
        ('"quoted"', {}, "quoted"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("null", {"type": "integer", "nullable": True}, None),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("ä\n\"'", {"type": "string"}, "ä\n\"'"),
        ("5", {"type": 7, "anyOf": 5, "oneOf": [None]}, 5),
    ],
)
def test_values(text: str, schema: dict[str, Any], value: Any) -> None:
    assert json.loads(json_of(text, types_of(schema))) == value
    assert type(json.loads(json_of(text, types_of(schema)))) is type(value)


def test_references_are_followed_within_the_schema() -> None:
    root = {
        "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"type": "integer"}, "C": {"$ref": "#/$defs/C"}}
    }
    assert resolved({"$ref": "#/$defs/A", "title": "t"}, root) == {"type": "integer", "title": "t"}
    for reference in ("#/$defs/C", "#/$defs/none", "http://x/y", 5):
        assert types_of(resolved({"$ref": reference}, root)) == frozenset()
