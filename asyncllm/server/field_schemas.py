"""The notes of fields.py put into JSON Schemas of the types that they are about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from asyncllm.sampling_params import SamplingParams
from asyncllm.server.fields import NOTES, note_of

_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(SamplingParams)
    if isinstance(field.default, bool | int | float)
}


SHAPES = tuple(note.type for note in NOTES.values() if note.type is not None)  # hashable, all


def describe_fields(
    requests: Iterable[type], components: dict[str, Any], schema_of: Callable[[Any], dict[str, Any]]
) -> None:
    """Put notes, ranges, defaults and the shapes of `Any` into the components of these types.

    `schema_of` one of `SHAPES`: a reference into the components, or what holds one.
    """
    for kind in with_parts(requests):
        properties = components[kind.__name__]["properties"]
        for name in kind.__struct_fields__:
            if (note := note_of(kind, name)) is None:
                continue
            if note.type is not None:
                properties[name] = dict(schema_of(note.type))
            if name in _DEFAULTS and note.kind == "done":
                properties[name]["default"] = _DEFAULTS[name]
            properties[name] |= {
                **note.schema,
                "description": note.description,
                "x-kind": note.kind,
            }


def with_parts(requests: Iterable[type]) -> list[Any]:
    """The request types and the Structs within them."""
    names: dict[str, Any] = {}
    for part in msgspec.inspect.multi_type_info(list(requests)):
        _collect(part, names)
    return list(names.values())


def _collect(part: Any, names: dict[str, Any]) -> None:
    if isinstance(part, msgspec.inspect.StructType):
        if part.cls.__name__ in names:
            return
        names[part.cls.__name__] = part.cls
        for field in part.fields:
            _collect(field.type, names)
    elif isinstance(part, msgspec.inspect.UnionType):
        for one in part.types:
            _collect(one, names)
    elif isinstance(part, msgspec.inspect.ListType):
        _collect(part.item_type, names)
