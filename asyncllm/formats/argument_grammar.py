"""The grammar of arguments that are written one by one, not as a JSON object.

They are in the order of the schema's properties; optional ones may be omitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.formats.answer_format import LiteralArguments, TaggedArguments
from asyncllm.formats.lark_text import LarkText
from asyncllm.formats.text_regex import TEXT_KEYWORDS, text_regexes
from asyncllm.formats.tools import Tool
from asyncllm.formats.values import STRING, resolved, types_of

# Supported keywords in the schema of an object with such arguments, and in that of a text.
_OBJECT_KEYWORDS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}
_TEXT_KEYWORDS = {"type", "enum", "const"}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$schema", "$id",
                "$comment", "readOnly", "writeOnly"}  # fmt: skip


def tagged_arguments(lark: LarkText, body: TaggedArguments, tool: Tool) -> str:
    """A call's name and arguments, up to the end of the body."""
    parts = [lark.literal(tool.name + "".join(body.name_end))]
    for key, schema, is_required in _arguments(tool):
        argument = lark.rule(_tagged_argument(lark, body, tool, key, schema))
        parts.append(argument if is_required else f"{argument}?")
    parts.append(lark.literal("".join(body.end)))
    return lark.rule(" ".join(filter(None, parts)))


def _tagged_argument(
    lark: LarkText, body: TaggedArguments, tool: Tool, key: str, schema: dict[str, Any]
) -> str:
    types = types_of(schema)
    line = "\n" if body.lines else ""
    marker = body.value_end.strip()
    after = body.value_end.removeprefix(marker)
    is_text = types == STRING or (not body.string_key_end and (not types or types >= STRING))
    key_end = body.string_key_end if types == STRING and body.string_key_end else body.key_end
    begin = f"{body.key_begin}{key}{''.join(key_end)}{line}"
    if not is_text:
        value = lark.json(_with_definitions(schema, tool), tool.strict)
        return f"{lark.literal(begin)} {value} {lark.literal(line + body.value_end)}"
    texts = _texts(schema, tool)
    if texts is None:
        text = _text_until(lark, schema, tool, key, line, marker)
        return f"{lark.literal(begin)} {text} {lark.literal(after)}"
    values = lark.any_of(map(lark.literal, texts))
    return f"{lark.literal(begin)} {values} {lark.literal(line + body.value_end)}"


def literal_arguments(lark: LarkText, body: LiteralArguments, tool: Tool) -> str:
    """A call's name and arguments, with commas between them."""
    arguments = [
        (lark.rule(f"{lark.literal(key + body.assign)} {value}"), is_required)
        for key, schema, is_required in _arguments(tool)
        for value in [_literal(lark, body, tool, key, schema)]
    ]
    first = rest = '""'  # what may follow before the first argument, and after one
    comma = lark.literal(body.separator)
    for argument, is_required in reversed(arguments):
        before, after = f"{argument} {rest}", f"{comma} {argument} {rest}"
        first = lark.rule(before if is_required else f"{before} | {first}")
        rest = lark.rule(after if is_required else f"{after} | {rest}")
    return lark.rule(f"{lark.literal(tool.name + body.open)} {first} {lark.literal(body.close)}")


def _literal(
    lark: LarkText, body: LiteralArguments, tool: Tool, key: str, schema: dict[str, Any]
) -> str:
    types, quote = types_of(schema), body.quotes[0]
    if types == STRING and len(quote) > 1:
        texts = _texts(schema, tool)
        if texts is None:
            return f"{lark.literal(quote)} {_text_until(lark, schema, tool, key, '', quote)}"
        return lark.any_of(lark.literal(quote + text + quote) for text in texts)
    if types == {"boolean"} and body.open == "(" and "enum" not in schema:
        return '("True" | "False")'
    return lark.json(_with_definitions(schema, tool), tool.strict)


def _arguments(tool: Tool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Each argument's name, its schema, and whether it is required."""
    root = tool.parameters
    _check(root, _OBJECT_KEYWORDS, tool)
    required = root.get("required")
    names = set(filter(_is_text, required)) if isinstance(required, list) else set()
    properties: dict[str, Any] = root.get("properties") or {}
    for key in (*properties, *sorted(names - properties.keys())):
        schema = properties.get(key, {})
        yield key, resolved(schema, root) if isinstance(schema, dict) else {}, key in names


def _texts(schema: dict[str, Any], tool: Tool) -> list[str] | None:
    """The allowed texts as they are written; None if any text is allowed."""
    is_listed = "const" in schema or "enum" in schema
    known = _TEXT_KEYWORDS if is_listed else _TEXT_KEYWORDS | TEXT_KEYWORDS
    _check(schema, known | ({"anyOf"} if _is_plain_union(schema) else set()), tool)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(allowed, list) or not allowed:
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in allowed]


def _text_until(
    lark: LarkText, schema: dict[str, Any], tool: Tool, key: str, before: str, marker: str
) -> str:
    """Any text up to the marker; for a strict tool, a text that matches its schema."""
    try:
        options = _text_options(schema) if tool.strict else []
    except ValueError as error:
        raise _unenforceable(str(error), tool) from None
    if not options:
        return lark.text_until(marker)
    return lark.text_matching(options, before, marker, f"{key!r:.100} of the tool {tool.name!r}")


def _text_options(schema: Mapping[str, Any]) -> list[list[str]]:
    """The regexes by option; a text must match all of one option. Empty if any text is allowed."""
    options = [option for option in schema.get("anyOf", [{}]) if option.get("type") != "null"]
    found = [text_regexes(schema) + text_regexes(option) for option in options]
    if not all(found):
        return []
    return [*found, ["null"]] if "null" in types_of(schema) else found


def _is_plain_union(schema: Mapping[str, Any]) -> bool:
    """Whether its options have only types, or constraints on a text beside null.

    With types only, any text is allowed.
    """
    options = schema.get("anyOf")
    if not isinstance(options, list) or not all(isinstance(option, dict) for option in options):
        return False
    types = [option.get("type") for option in options]
    is_text = "string" in types and set(types) <= {"string", "null"}
    known = _ANNOTATIONS | {"type"} | (TEXT_KEYWORDS if is_text else set())
    return all(
        kind in ("string", "null", "boolean", "integer", "number") and not option.keys() - known
        for kind, option in zip(types, options, strict=True)
    )


def _with_definitions(schema: dict[str, Any], tool: Tool) -> dict[str, Any]:
    """A schema with the definitions that its references need."""
    kept: dict[str, Any] = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return {**schema, **kept}


def _check(schema: Mapping[str, Any], known: set[str], tool: Tool) -> None:
    if tool.strict:
        for keyword in schema.keys() - known - _ANNOTATIONS:
            raise _unenforceable(keyword, tool)


def _unenforceable(keyword: str, tool: Tool) -> InvalidRequestError:
    message = f"{tool.param}: {keyword!r:.100} cannot be enforced in this model's tool calls"
    return InvalidRequestError(message, tool.param)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
