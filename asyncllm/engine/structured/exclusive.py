"""Decides whether two schemas exclude each other: no value satisfies both.

It compares their types, their constants, and properties that one of them requires and for which
both list constants (the discriminator of a union). False only means that it could not be shown.
"""

from __future__ import annotations

from typing import Any

import orjson

from asyncllm.engine.structured.schema_refs import without_refs


def exclude_each_other(root: dict[str, Any], a: Any, b: Any) -> bool:
    a, b = without_refs(root, a), without_refs(root, b)
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    types_a, types_b = _types(a), _types(b)
    if types_a is not None and types_b is not None and not types_a & types_b:
        return True
    if _constants_differ(a, b):
        return True
    if types_a != {"object"} or types_b != {"object"}:
        return False
    return any(
        _constants_differ(
            without_refs(root, _property(a, name)), without_refs(root, _property(b, name))
        )
        for name in {*_required(a), *_required(b)}
    )


def _types(schema: dict[str, Any]) -> set[str] | None:
    """The types of a schema; None if it does not list them. An integer is a number."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return {"number" if name == "integer" else name for name in names}


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [n for n in required if isinstance(n, str)] if isinstance(required, list) else []


def _constants_differ(a: Any, b: Any) -> bool:
    values_a, values_b = _constants(a), _constants(b)
    return values_a is not None and values_b is not None and not values_a & values_b


def _constants(schema: Any) -> set[bytes] | None:
    """The values that it allows; None if it does not list them, or if some are containers."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    return {_canonical(value) for value in values}


def _canonical(scalar: Any) -> bytes:
    """Bytes that are equal for equal JSON values: 1 equals 1.0, but not true."""
    number = isinstance(scalar, int | float) and not isinstance(scalar, bool)
    return orjson.dumps(float(scalar) if number else scalar)
