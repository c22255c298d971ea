"""Requests whose answer must have a shape, as OpenAI clients send them: JSON schema and tools.

Property names come from the seed, so a server that caches grammars meets NUM_SHAPES different
ones. Whether an answer has the shape is checked here too, roughly: the right keys, parsable JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

NUM_SHAPES = 8
NAMES = ("name", "city", "count", "price", "colour", "year", "size", "weight", "status", "owner")
TYPES = ("string", "integer", "number", "boolean")


def random_schema(rng: np.random.Generator) -> dict[str, Any]:
    names = rng.choice(NAMES, rng.integers(2, 6), replace=False).tolist()
    return {
        "type": "object",
        "properties": {name: {"type": TYPES[rng.integers(len(TYPES))]} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def schema_fields(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tool_fields(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    functions = [
        {"name": f"look_up_{i}", "description": "Looks it up.", "parameters": schema}
        for i, schema in enumerate(schemas)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"tools": tools, "tool_choice": "auto"}


def fits_schema(text: str, required: Sequence[str]) -> bool:
    try:
        answer = orjson.loads(text)
    except ValueError:
        return False
    return isinstance(answer, dict) and set(answer) == set(required)


def has_well_formed_calls(calls: dict[int, tuple[str, str]]) -> bool | None:
    """calls: index -> (name, arguments). None if the model called nothing, which `auto` allows."""
    if not calls:
        return None
    try:
        return all(name and isinstance(orjson.loads(a), dict) for name, a in calls.values())
    except ValueError:
        return False
