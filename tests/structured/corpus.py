"""JSON schemas, one per keyword that can be enforced and for how they combine."""

from __future__ import annotations

import datetime
import ipaddress
import re
import urllib.parse
from typing import Any

import jsonschema

Schema = dict[str, Any]


def closed(properties: Schema, *optional: str, **more: Any) -> Schema:
    """An object of these properties and no others, all required but `optional`."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def text(**keywords: Any) -> Schema:
    return {"type": "string", "maxLength": 12, **keywords}


INTEGER = {"type": "integer", "minimum": -99, "maximum": 99}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed(
            {
                "value": INTEGER,
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "children",
        )
    },
}
PETS = {
    "$defs": {
        "cat": closed({"kind": {"const": "cat"}, "lives": INTEGER}),
        "dog": closed({"kind": {"enum": ["dog", "puppy"]}, "good": {"type": "boolean"}}),
    }
}  # fmt: skip

CORPUS: dict[str, Schema] = {
    # types
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": INTEGER,
    "number": {"type": "number", "minimum": -10, "maximum": 10},
    "string": text(),
    "array": {"type": "array", "items": INTEGER, "maxItems": 3},
    "object": closed({"a": INTEGER}),
    "types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "nullable text": {"anyOf": [text(), {"type": "null"}]},
    "pydantic optional": closed(
        {"name": {"anyOf": [text(), {"type": "null"}], "default": None, "title": "Name"}}
    ),
    # enum, const
    "enum": {"enum": ["red", "green", 3, None, True, 1.5]},
    "enum of containers": {"enum": [[1, "a"], {"k": [None]}, []]},
    "const text": {"const": 'quoted "text" \\ and\nlines'},
    "const object": {"const": {"a": {"b": [1, 2.5, None]}, "c": "é"}},
    "const number": {"const": -12.75},
    "typed enum": {"type": "string", "enum": ["a", "b", 3]},
    # objects
    "required and optional": closed({"a": INTEGER, "b": text(), "c": {"type": "null"}}, "b"),
    "all optional": closed({"a": INTEGER, "b": text(), "c": {"type": "null"}}, "a", "b", "c"),
    "nested": closed({"a": closed({"b": closed({"c": INTEGER})})}),
    "additional typed": {
        "type": "object",
        "properties": {"id": INTEGER},
        "required": ["id"],
        "additionalProperties": text(),
        "maxProperties": 3,
    },
    "map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "min properties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1,
                       "maxProperties": 2},
    "one of the optional": closed({"a": INTEGER, "b": INTEGER}, "a", "b", minProperties=1),
    "no properties": {"type": "object", "maxProperties": 0},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": INTEGER, "^t_[a-z]{1,3}$": text()},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "pattern and listed": {
        "type": "object",
        "properties": {"n_a": {"minimum": 5}},
        "patternProperties": {"^n_": INTEGER},
        "required": ["n_a"],
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "required but not listed": {
        "type": "object",
        "required": ["x"],
        "additionalProperties": INTEGER,
        "maxProperties": 1,
    },
    "awkward names": closed({'a"b': INTEGER, "c\\d": INTEGER, "": INTEGER, "é ü": INTEGER}),
    # arrays
    "min items": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "exactly": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "empty": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [INTEGER, text(), {"type": "null"}],
              "items": False, "minItems": 3},
    "open tuple": {"type": "array", "prefixItems": [text()], "items": INTEGER, "maxItems": 3},
    "old tuple": {"type": "array", "items": [INTEGER, text()], "additionalItems": False},
    "objects in arrays": {"type": "array", "items": closed({"a": INTEGER}), "maxItems": 2},
    "no duplicates asked": {"type": "array", "items": INTEGER, "uniqueItems": False,
                            "maxItems": 2},
    # strings
    "min length": {"type": "string", "minLength": 3, "maxLength": 6},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "pattern anywhere": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 8},
    "pattern, a side": {"type": "string", "pattern": "^ab|cd$", "maxLength": 6},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
    # formats
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date", "time", "ipv4", "uuid", "duration")
    },
    **{
        f"format {name}": {"type": "string", "format": name, "maxLength": 40}
        for name in ("date-time", "email", "hostname", "ipv6", "uri")
    },
    "format and pattern": {"type": "string", "format": "date", "pattern": "-02-"},
    "format of display": {"type": "string", "format": "password", "maxLength": 5},
    # numbers
    "minimum": {"type": "integer", "minimum": 7, "maximum": 12},
    "negative": {"type": "integer", "minimum": -1005, "maximum": -17},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "exclusive number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5},
    "decimal bounds": {"type": "number", "minimum": -1.25, "maximum": 13.5},
    "old exclusive": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer",
                      "minimum": 3, "exclusiveMinimum": True, "maximum": 5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "decimal multiple": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    "negative multiple": {"type": "integer", "multipleOf": 3, "minimum": -9, "maximum": 9},
    # combinations
    "any of": {"anyOf": [INTEGER, text(), {"type": "array", "items": INTEGER, "maxItems": 2}]},
    "any of objects": {"anyOf": [closed({"a": INTEGER}), closed({"a": text(), "b": INTEGER})]},
    "one of types": {"oneOf": [{"type": "boolean"}, {"type": "null"}, INTEGER]},
    "one of constants": {"oneOf": [{"const": "a"}, {"const": "b"}, {"enum": [1, 2]}]},
    "one of tagged": {"oneOf": list(PETS["$defs"].values())},
    "one of references": {
        **PETS, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
    },
    "one of beside any of": {
        "anyOf": [INTEGER, {"type": "null"}],
        "oneOf": [{"type": "null"}, {"minimum": 5, "type": "integer"}],
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": text()}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "siblings": {"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": INTEGER}},
    # references
    "reference": closed({"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}},
                        **{"$defs": {"x": INTEGER}}),
    "definitions": {"definitions": {"x/y": text()}, "$ref": "#/definitions/x~1y"},
    "recursive": TREE,
    "recursive at the root": closed(
        {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": INTEGER}
    ),
    # whole records
    "record": closed(
        {
            "name": text(minLength=1),
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email", "maxLength": 24},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
            "address": closed({"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": text()}),
            "score": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        },
        "email",
    ),
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/order",
        "$comment": "nothing is fetched",
        **closed({"id": INTEGER, "lines": {"type": "array", "items": {"$ref": "#/definitions/l"},
                                           "maxItems": 2}}),
        "definitions": {"l": closed({"sku": text(pattern="^[a-z]+$"), "n": INTEGER})},
    },
}  # fmt: skip


def is_valid(schema: Schema, value: Any) -> bool:
    """By jsonschema, formats included."""
    kind = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft201909Validator if _is_old_tuple(schema) else
        jsonschema.Draft202012Validator,
    )  # fmt: skip
    validator: Any = kind(schema, format_checker=FORMATS)
    return bool(validator.is_valid(value))


def _is_old_tuple(schema: Schema) -> bool:
    return isinstance(schema.get("items"), list)


FORMATS = jsonschema.FormatChecker()
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"


@FORMATS.checks("date-time", ValueError)
def _date_time(value: object) -> bool:
    datetime.datetime.fromisoformat(str(value).upper())
    return "T" in str(value).upper() and re.search(r"[zZ]|[+-]\d\d:\d\d$", str(value)) is not None


@FORMATS.checks("time", ValueError)
def _time(value: object) -> bool:
    datetime.time.fromisoformat(str(value).upper())
    return True


@FORMATS.checks("hostname")
def _hostname(value: object) -> bool:
    return re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", str(value)) is not None


@FORMATS.checks("uri", ValueError)
def _uri(value: object) -> bool:
    return urllib.parse.urlsplit(str(value)).scheme != ""


@FORMATS.checks("duration")
def _duration(value: object) -> bool:
    date = r"(?=\d+[YMD])(\d+Y)?(\d+M)?(\d+D)?"
    clock = r"T(?=\d+[HMS])(\d+H)?(\d+M)?(\d+S)?"
    return re.fullmatch(rf"P(\d+W|{date}({clock})?|{clock})", str(value)) is not None


@FORMATS.checks("ipv6", ValueError)
def _ipv6(value: object) -> bool:
    ipaddress.IPv6Address(str(value))
    return "%" not in str(value)
