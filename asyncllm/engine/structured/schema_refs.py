"""JSON pointers into a schema."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

MAX_REF_HOPS = 16


def resolve_ref(root: dict[str, Any], ref: str) -> Any:
    """The value that the fragment `ref` (`#` or `#/...`) points to. Raises `LookupError`."""
    node: Any = root
    for escaped in ref.split("/")[1:]:
        key = unquote(escaped).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            if not key.isdecimal():
                raise LookupError(key)
            node = node[int(key)]
        elif isinstance(node, dict):
            node = node[key]
        else:
            raise LookupError(key)
    return node


def without_refs(root: dict[str, Any], node: Any) -> Any:
    """The schema that `node` refers to, if it is only a reference; else `node`."""
    for _ in range(MAX_REF_HOPS):
        if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
            return node
        try:
            node = resolve_ref(root, node["$ref"])
        except LookupError:
            return node
    return node
