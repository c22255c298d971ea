"""Checks and rewrites a JSON schema, so that its grammar is never looser than the schema.

llguidance refuses most keywords that it cannot enforce, but does not say where. It accepts some
that it does not enforce (29 February, unique keys with minProperties, integers above 2**53), and
refuses some that it could (`oneOf` of references that exclude each other). This module visits all
reachable parts of the schema, names keywords and places in errors, and rewrites the rest.

A `$ref` is a JSON pointer into the schema; nothing outside the schema is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from asyncllm.engine.structured.exclusive import exclude_each_other
from asyncllm.engine.structured.schema_refs import resolve_ref
from asyncllm.errors import InvalidRequestError
from asyncllm.formats.text_formats import ANNOTATIONS, DATE

MAX_OBJECT_PROPERTIES = 1024  # of one object; compiling takes time with their square
MAX_ONE_OF_OPTIONS = 64
MAX_EXACT_INTEGER = 2**53

Schema = dict[str, Any]

# Values with which an unenforceable keyword has no effect.
_UNENFORCEABLE: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "uniqueItems": (False,),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "x-guidance": (),
}
# Keyword -> keywords without which it has no effect.
_NEEDS_ONE_OF = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}

_CLOCK = "[0-9]{2}:[0-9]{2}:[0-5]"  # without leap seconds
# Formats for which llguidance's own expressions are not exact.
_STRICTER = {"date": f"^{DATE}$", "time": f"^{_CLOCK}", "date-time": f"^{DATE}[Tt]{_CLOCK}"}
_FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip


def enforceable_schema(root: Schema, param: str, *, close_objects: bool = False) -> Schema:
    """`root`, changed in place so that all of it can be enforced.

    close_objects: forbid other properties in objects that list properties. Raises
    `InvalidRequestError` with `param`, naming keyword and place.
    """
    if not isinstance(root, dict):
        raise InvalidRequestError(f"{param} must be a JSON schema object", param)
    _Walk(root, param, close_objects).run()
    return root


class _Walk:
    def __init__(self, root: Schema, param: str, close_objects: bool) -> None:
        self._root = root
        self._param = param
        self._close_objects = close_objects
        self._todo: list[tuple[str, Any]] = [("#", root)]
        self._seen: set[int] = set()

    def run(self) -> None:
        while self._todo:
            place, node = self._todo.pop()
            if isinstance(node, bool) or id(node) in self._seen:
                continue
            if not isinstance(node, dict):
                self._refuse(place, "a schema is an object or a boolean")
            self._seen.add(id(node))
            self._check(place, node)
            self._todo.extend(_subschemas(place, node))

    def _check(self, place: str, node: Schema) -> None:
        self._check_keywords(place, node)
        self._check_integers(place, node)
        self._check_open_zero(place, node)
        self._check_properties(place, node)
        self._check_format(place, node)
        self._follow_ref(place, node)
        self._check_one_of(node)

    def _check_keywords(self, place: str, node: Schema) -> None:
        if place != "#" and ("$id" in node or isinstance(node.get("id"), str)):
            self._refuse(place, "'$id' is supported at the top only")
        for keyword in [k for k in _UNENFORCEABLE if k in node]:
            partners = _NEEDS_ONE_OF.get(keyword)
            means_nothing = node[keyword] in _UNENFORCEABLE[keyword] or (
                partners is not None and not any(partner in node for partner in partners)
            )
            if not means_nothing:
                self._refuse(place, f"the keyword {keyword!r} cannot be enforced")
        for keyword in _UNENFORCEABLE:
            node.pop(keyword, None)

    def _check_integers(self, place: str, node: Schema) -> None:
        for keyword in (
            "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum",
        ):  # fmt: skip
            for value in _leaves(node.get(keyword)):
                if type(value) is int and abs(value) > MAX_EXACT_INTEGER and float(value) != value:
                    self._refuse(
                        place, f"{keyword!r}: integers beyond 2**53 cannot be enforced exactly"
                    )

    def _check_open_zero(self, place: str, node: Schema) -> None:
        """llguidance allows an excluded 0 if the other bound is nearer than 1."""
        if node.get("type") == "integer":
            return
        for exclusive, same, other in (
            ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
            ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
        ):
            bound = node.get(exclusive)
            bound = node.get(same) if bound is True else bound
            others = [node[name] for name in other if type(node.get(name)) in (int, float)]
            if type(bound) in (int, float) and bound == 0 and any(abs(o) < 1 for o in others):
                self._refuse(
                    place, f"{exclusive!r} 0 with another bound nearer than 1 cannot be enforced"
                )

    def _check_properties(self, place: str, node: Schema) -> None:
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, dict) and len(properties) > MAX_OBJECT_PROPERTIES:
            self._refuse(place, f"'properties' must be at most {MAX_OBJECT_PROPERTIES}")
        least = node.get("minProperties")
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if type(least) is int and least > num_required + 1:
            self._refuse(
                place,
                "'minProperties' above the number of required properties + 1 cannot be enforced: "
                "the grammar does not keep other keys unique",
            )
        listed = isinstance(properties, dict) or isinstance(node.get("patternProperties"), dict)
        if self._close_objects and listed:
            node.setdefault("additionalProperties", False)

    def _check_format(self, place: str, node: Schema) -> None:
        name = node.get("format")
        if not isinstance(name, str):
            return
        if name in ANNOTATIONS:
            del node["format"]
        elif name not in _FORMATS:
            known = ", ".join(sorted(_FORMATS))
            self._refuse(place, f"'format' {name!r:.40} cannot be enforced, only {known}")
        elif name in _STRICTER:
            stricter = {"pattern": _STRICTER[name]}
            if "pattern" in node:
                all_of = node.get("allOf")
                node["allOf"] = [*(all_of if isinstance(all_of, list) else []), stricter]
            else:
                node |= stricter

    def _follow_ref(self, place: str, node: Schema) -> None:
        if "$ref" not in node:
            return
        ref = node["$ref"]
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            self._refuse(
                place,
                f"'$ref' {ref!r:.80}: only JSON pointers into this schema (#/...) are followed; "
                "nothing is fetched",
            )
        try:
            self._todo.append((ref, resolve_ref(self._root, ref)))
        except LookupError:
            self._refuse(place, f"'$ref' {ref!r:.80} points nowhere")

    def _check_one_of(self, node: Schema) -> None:
        """Replace `oneOf` by `anyOf` if its options exclude each other."""
        options = node.get("oneOf")
        if not isinstance(options, list) or len(options) > MAX_ONE_OF_OPTIONS:
            return
        if all(exclude_each_other(self._root, a, b) for a, b in combinations(options, 2)):
            del node["oneOf"]
            if "anyOf" in node:
                all_of = node.get("allOf")
                node["allOf"] = [*(all_of if isinstance(all_of, list) else []), {"anyOf": options}]
            else:
                node["anyOf"] = options

    def _refuse(self, place: str, why: str) -> None:
        shown = place if len(place) <= 200 else f"{place[:200]}..."
        raise InvalidRequestError(f"{self._param}: at {shown}: {why}", self._param)


def _subschemas(place: str, node: Schema) -> Iterator[tuple[str, Any]]:
    for keyword in ("properties", "patternProperties"):
        value = node.get(keyword)
        if isinstance(value, dict):
            yield from ((f"{place}/{keyword}/{name}", child) for name, child in value.items())
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        value = node.get(keyword)
        if isinstance(value, list):
            yield from ((f"{place}/{keyword}/{i}", child) for i, child in enumerate(value))
    for keyword in ("items", "additionalProperties", "additionalItems"):
        value = node.get(keyword)
        if isinstance(value, dict):
            yield f"{place}/{keyword}", value


def _leaves(value: Any) -> Iterator[Any]:
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
        else:
            yield node
