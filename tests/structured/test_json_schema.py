"""Schemas are refused by keyword and place, and some kept although llguidance would not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.engine.structured.compiler import CompiledGrammar
from asyncllm.engine.structured.json_schema import (
    MAX_OBJECT_PROPERTIES,
    MAX_ONE_OF_OPTIONS,
    enforceable_schema,
)
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import InvalidRequestError
from tests.structured.fits import fits

Compiled = Callable[..., CompiledGrammar]
Schema = dict[str, Any]


def at_a(schema: Any) -> Schema:
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (at_a({"not": {"type": "null"}}), "#/properties/a: the keyword 'not'"),
        (at_a({"if": {}, "then": {}}), "'if'"),
        (at_a({"type": "array", "uniqueItems": True}), "'uniqueItems'"),
        (at_a({"type": "array", "contains": {"const": 1}}), "'contains'"),
        (at_a({"type": "object", "propertyNames": {"maxLength": 3}}), "'propertyNames'"),
        (at_a({"dependentRequired": {"a": ["b"]}}), "'dependentRequired'"),
        (at_a({"dependentSchemas": {"a": {}}}), "'dependentSchemas'"),
        (at_a({"dependencies": {"a": ["b"]}}), "'dependencies'"),
        (at_a({"unevaluatedProperties": False}), "'unevaluatedProperties'"),
        (at_a({"unevaluatedItems": False}), "'unevaluatedItems'"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "'not'"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
        ({"items": [{"not": {}}]}, "#/items/0"),
        ({"patternProperties": {"^a": {"not": {}}}}, "#/patternProperties/^a"),
        ({"additionalProperties": {"not": {}}}, "#/additionalProperties"),
        ({"allOf": [{"anyOf": [{"not": {}}]}]}, "#/allOf/0/anyOf/0"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}, "#/$defs/x"),
        ({"$ref": "#/weird", "weird": {"not": {}}}, "#/weird"),
        # references
        ({"$ref": "https://example.com/schema.json"}, "nothing is fetched"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "nothing is fetched"),
        ({"$ref": "other.json#/a"}, "nothing is fetched"),
        ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
        ({"$ref": 5}, "'$ref'"),
        ({"$ref": "#/$defs/none"}, "points nowhere"),
        ({"$ref": "#/anyOf/7", "anyOf": [{}]}, "points nowhere"),
        (at_a({"$id": "https://example.com/a", "type": "null"}), "'$id'"),
        ({"$ref": "#"}, "no text satisfies it"),
        # formats and numbers
        ({"type": "string", "format": "iri"}, "'format' 'iri'"),
        ({"type": "string", "format": "int32"}, "'format' 'int32'"),
        ({"const": 2**53 + 1}, "2**53"),
        ({"enum": [[{"a": -(2**60) - 1}]]}, "2**53"),
        ({"type": "integer", "maximum": 2**53 + 1}, "2**53"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "'exclusiveMinimum' 0"),
        ({"exclusiveMaximum": 0, "exclusiveMinimum": -0.5}, "'exclusiveMaximum' 0"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "'exclusiveMinimum' 0"),
        # counts that repeated keys would falsify
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({"type": "object", "required": ["a"], "minProperties": 3}, "'minProperties'"),
        # unions that cannot be told apart
        ({"oneOf": [{"type": "string", "minLength": 3}, {"type": "string"}]}, "'oneOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
        ({"oneOf": [{"const": {"a": 1}}, {"const": {"a": 1.0}}]}, "'oneOf'"),
        # what is no schema
        ({"type": "strin"}, "strin"),
        ({"type": 5}, "type must be"),
        ({"properties": 5}, "properties"),
        ({"properties": {"a": 5}}, "#/properties/a: a schema is an object or a boolean"),
        ({"required": "a", "type": "object"}, "required"),
        ({"enum": []}, "structured_outputs.json"),
        ({"type": "string", "pattern": "["}, "regex parse error"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
        (at_a({}) | {"properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
        ({"properties": {str(i): {} for i in range(MAX_OBJECT_PROPERTIES + 1)}}, "at most"),
    ],
)  # fmt: skip
def test_refused_by_name(schema: Schema, named: str, compiled: Compiled) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(json=schema)
    assert caught.value.param == "structured_outputs.json"
    assert named in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False}, {"not": False}, {"then": {"not": {}}}, {"else": False},
        {"if": {"not": {}}}, {"unevaluatedProperties": True}, {"propertyNames": {}},
        {"minContains": 2}, {"dependentRequired": {}}, {"title": "x"}, {"nullable": True},
        {"$defs": {"unused": {"not": {}}}}, {"default": 3}, {"examples": [1]},
    ],
)  # fmt: skip
def test_keywords_that_ask_for_nothing(keywords: Schema, compiled: Compiled) -> None:
    compiled(json=at_a({"type": "null"} | keywords) | keywords)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "date"},
         ["2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01"],
         ["2023-02-29", "1900-02-29", "0000-01-01", "2024-02-30", "2024-04-31", ""]),
        ({"type": "string", "format": "date-time"},
         ["2024-02-29T23:59:59Z", "2023-01-02t03:04:05.678+09:30"],
         ["2023-02-29T00:00:00Z", "2024-01-01T23:59:60Z", "2024-01-01T24:00:00Z",
          "2024-01-01T00:00:00"]),
        ({"type": "string", "format": "time"}, ["23:59:59Z", "00:00:00.5+01:00"],
         ["23:59:60Z", "24:00:00Z", "00:00:00"]),
        ({"type": "string", "format": "date", "pattern": "^20"}, ["2024-01-01"], ["1999-01-01"]),
        ({"type": "string", "pattern": "b$", "minLength": 2, "maxLength": 2}, ["ab"],
         ["b", "ba", "aab"]),
    ],
)  # fmt: skip
def test_strings(
    schema: Schema, good: list[str], bad: list[str], compiled: Compiled, tokenizer: Tokenizer
) -> None:
    grammar = compiled(json=schema)
    assert all(fits(grammar, tokenizer, json.dumps(text)) for text in good)
    assert not any(fits(grammar, tokenizer, json.dumps(text)) for text in bad)


def test_a_union_told_apart_by_a_required_constant(
    compiled: Compiled, tokenizer: Tokenizer
) -> None:
    """As pydantic writes a discriminated union. Without `required` both could be meant."""
    schema: Schema = {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {"const": name, "type": "string"}},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for name in ("Cat", "Dog")
        },
    }
    grammar = compiled(json=schema)
    assert fits(grammar, tokenizer, '{"kind": "Cat"}')
    assert not fits(grammar, tokenizer, '{"kind": "Cow"}')
    for option in schema["$defs"].values():
        del option["required"]
    with pytest.raises(InvalidRequestError, match="oneOf"):
        compiled(json=schema)


def test_options_at_the_limit(compiled: Compiled) -> None:
    options = [{"enum": [i], "minimum": 0} for i in range(MAX_ONE_OF_OPTIONS)]
    compiled(json={"oneOf": options})


def test_references_in_a_circle_end() -> None:
    a: Schema = {"$ref": "#/$defs/b"}
    schema = {"oneOf": [a, a], "$defs": {"a": a, "b": {"$ref": "#/$defs/a"}}}
    assert "oneOf" in enforceable_schema(schema, "json")
