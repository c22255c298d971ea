"""Structural tags: free text with constrained parts between given marks.

There are two notations, with triggers (`{"structures": [{"begin", "schema", "end"}], "triggers"}`)
and with formats (`{"type": "structural_tag", "format": {...}}`). Unknown formats and fields are
refused by name.
"""

from __future__ import annotations

from typing import Any

from asyncllm.engine.structured.gbnf import any_to_lark
from asyncllm.engine.structured.json_schema import enforceable_schema
from asyncllm.engine.structured.lark import ANY_TEXT, LarkBuilder, quoted
from asyncllm.errors import InvalidRequestError

MAX_STRUCTURAL_TAGS = 128
PARAM = "structured_outputs.structural_tag"

Fields = dict[str, Any]


class StructuralTagCompiler:
    """json_options: llguidance's options for all schemas."""

    def __init__(self, builder: LarkBuilder, json_options: Fields, close_objects: bool) -> None:
        self._builder = builder
        self._json_options = json_options
        self._close_objects = close_objects

    def expression(self, tag: Fields) -> str:
        """The tag as a Lark expression. Raises `InvalidRequestError`."""
        if "structures" in tag or "triggers" in tag:
            fields = _fields(tag, "", {"structures", "triggers"}, {"type"})
            return self._triggered(
                {
                    "tags": [
                        _fields(s, "structures", {"begin", "schema", "end"})
                        for s in _list(fields["structures"], "structures")
                    ],
                    "triggers": fields["triggers"],
                }
            )
        return self._format(_fields(tag, "", {"type", "format"})["format"], is_last=True)

    def _format(self, node: Any, *, is_last: bool) -> str:
        kind = node.get("type") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in _FORMATS:
            known = ", ".join(sorted(_FORMATS))
            raise _refusal(f"the format type {kind!r:.60} is not supported, only {known}")
        if kind == "any_text" and not is_last:
            raise _refusal("'any_text' is supported at the end, and as the content of a tag")
        required, optional = _FORMATS[kind]
        fields = _fields(node, kind, {"type", *required}, optional)
        return getattr(self, f"_{kind}")(fields)

    def _const_string(self, fields: Fields) -> str:
        return self._builder.literal(_text(fields["value"], "value")) or quoted("")

    def _json_schema(self, fields: Fields) -> str:
        return self._schema(fields["json_schema"])

    def _any_text(self, fields: Fields) -> str:
        return self._builder.rule(ANY_TEXT)

    def _regex(self, fields: Fields) -> str:
        return self._builder.regex(_text(fields["pattern"], "pattern"))

    def _grammar(self, fields: Fields) -> str:
        return self._builder.lark(any_to_lark(_text(fields["grammar"], "grammar"), PARAM))

    def _sequence(self, fields: Fields) -> str:
        elements = _list(fields["elements"], "elements")
        last = len(elements) - 1
        parts = [self._format(node, is_last=i == last) for i, node in enumerate(elements)]
        return self._builder.rule(" ".join(parts))

    def _or(self, fields: Fields) -> str:
        elements = _list(fields["elements"], "elements")
        return self._builder.rule(
            " | ".join(self._format(node, is_last=False) for node in elements)
        )

    def _tag(self, fields: Fields) -> str:
        begin = self._builder.literal(_text(fields["begin"], "begin"))
        return self._builder.rule(f"{begin} {self._content_and_end(fields)}")

    def _content_and_end(self, fields: Fields) -> str:
        end = _text(fields["end"], "end")
        if "schema" in fields:  # the notation with triggers
            return f"{self._schema(fields['schema'])} {self._builder.literal(end)}"
        content = fields["content"]
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            _fields(content, "any_text", {"type"})
            return self._builder.text_until(end)
        return f"{self._format(content, is_last=not end)} {self._builder.literal(end)}"

    def _triggered_tags(self, fields: Fields) -> str:
        tags = [_tag_fields(node) for node in _list(fields["tags"], "tags")]
        return self._triggered({**fields, "tags": tags})

    def _triggered(self, fields: Fields) -> str:
        """Free text; a trigger must be followed by the rest of a tag that begins with it."""
        triggers = [_text(t, "triggers") for t in _list(fields["triggers"], "triggers")]
        by_trigger: dict[str, list[str]] = {}
        for tag in fields["tags"]:
            begin = _text(tag["begin"], "begin")
            trigger = next((t for t in triggers if t and begin.startswith(t)), None)
            if trigger is None:
                raise _refusal(f"no trigger is the beginning of {begin!r:.80}")
            rest = self._builder.literal(begin[len(trigger) :])
            body = f"{rest} {self._content_and_end(tag)}"
            by_trigger.setdefault(trigger, []).append(body)
        calls = [
            f"{self._builder.text_until(trigger)} ({' | '.join(bodies)})"
            for trigger, bodies in by_trigger.items()
        ]
        call = self._builder.rule(" | ".join(calls))
        return self._repeated(call, fields, separator=None)

    def _tags_with_separator(self, fields: Fields) -> str:
        tags = [self._tag(_tag_fields(node)) for node in _list(fields["tags"], "tags")]
        separator = quoted(_text(fields["separator"], "separator"))
        return self._repeated(self._builder.rule(" | ".join(tags)), fields, separator)

    def _repeated(self, call: str, fields: Fields, separator: str | None) -> str:
        """With a separator, only it may come between the calls; without, any text may."""
        once = _bool(fields.get("stop_after_first", False), "stop_after_first")
        needed = _bool(fields.get("at_least_one", False), "at_least_one")
        if separator is not None:
            body = call if once else f"{call} ({separator} {call})*"
            return self._builder.rule(body if needed else f"({body})?")
        tail = self._builder.rule(ANY_TEXT)
        if once:
            return self._builder.rule(call if needed else f"{call} | {tail}")
        return self._builder.rule(f"{call}{'+' if needed else '*'} {tail}")

    def _schema(self, schema: Any) -> str:
        schema = {} if schema is True else schema
        enforceable_schema(schema, PARAM, close_objects=self._close_objects)
        return self._builder.value_of(schema, self._json_options)


# type -> required and optional fields
_FORMATS: dict[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "any_text": (set(), set()),
    "regex": ({"pattern"}, set()),
    "grammar": ({"grammar"}, set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}: {why}", PARAM)


def _tag_fields(node: Any) -> Fields:
    return _fields(node, "tag", _FORMATS["tag"][0], {"type"})


def _fields(node: Any, kind: str, required: set[str], optional: set[str] = frozenset()) -> Fields:  # type: ignore[assignment]
    """`node`, after checking that it has the required fields, and no others with a value."""
    where = f" of {kind!r}" if kind else ""
    if not isinstance(node, dict):
        raise _refusal(f"what stands for a tag or a format{where} must be an object")
    missing = sorted(required - node.keys())
    if missing:
        raise _refusal(f"the field {missing[0]!r}{where} is missing")
    for name in sorted(node.keys() - required - optional):
        if node[name] not in (None, False, []):
            raise _refusal(f"the field {name!r:.60}{where} is not supported")
    return node


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_STRUCTURAL_TAGS:
        raise _refusal(f"{name!r} must be a list of 1 to {MAX_STRUCTURAL_TAGS}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _refusal(f"{name!r} must be a text")
    return value


def _bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _refusal(f"{name!r} must be a bool")
    return value
