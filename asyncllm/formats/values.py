"""Converts an argument's text to JSON, by its type in the tool's schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_UNION_DEPTH = 4
_MAX_REFERENCES = 8  # in a chain
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def resolved(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or if it is a reference, the definition of `root` that it refers to."""
    for _ in range(_MAX_REFERENCES):
        match = _REFERENCE.fullmatch(str(schema.get("$ref")))
        definitions = root.get(match[1]) if match else None
        target = definitions.get(match[2]) if match and isinstance(definitions, dict) else None
        if not isinstance(target, dict):
            break
        schema = {**target, **{key: schema[key] for key in schema.keys() - {"$ref"}}}
    return schema


def types_of(schema: object, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema names; empty if it names none."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found.update(item for item in declared if isinstance(item, str))
    if not found and isinstance(schema.get("enum"), list):
        found.update(_type_of(item) for item in schema["enum"])
    if schema.get("nullable") is True:
        found.add("null")
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        if isinstance(choices, list) and depth < _MAX_UNION_DEPTH:
            found.update(*(types_of(choice, depth + 1) for choice in choices))
    return frozenset(found)


def json_of(text: str, types: frozenset[str]) -> str:
    """`text` as a value of one of `types` (of any type, if there are none), else as a string."""
    if types == STRING:
        return quoted(text)
    stripped = text.strip()
    try:
        value = json.loads(PYTHON.get(stripped, stripped), parse_constant=refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value) if "integer" in types else value
    if _fits(value, types):
        return json.dumps(value, ensure_ascii=False)
    return quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def inside(text: str) -> str:
    """The contents of a JSON string."""
    return quoted(text)[1:-1]


def refuse(constant: str) -> None:
    """For `json.loads`, which takes NaN and infinities."""
    raise ValueError(f"{constant} is no JSON")


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    if kind == "string":  # quoted, although strings are written without quotes
        return "string" not in types
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return not types or kind in types or (kind == "integer" and "number" in types)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
