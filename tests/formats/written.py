"""Calls as a family writes them, made from the same record that the parser is driven by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncllm.formats.answer_format import (
    AnswerFormat,
    CallSyntax,
    JsonCall,
    LiteralArguments,
    NamedJson,
    TaggedArguments,
)

Call = tuple[str, dict[str, Any]]


def written(answer_format: AnswerFormat, calls: Sequence[Call]) -> str:
    if answer_format.channels is not None:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{json.dumps(arguments)}<|call|>"
            for name, arguments in calls
        )
    syntax = answer_format.calls[0]
    begin, end = "".join(syntax.call_begin), "".join(syntax.call_end)
    bodies = [begin + _body(syntax, i, *call) + end for i, call in enumerate(calls)]
    return "".join(syntax.begin) + syntax.separator.join(bodies) + "".join(syntax.end)


def _body(syntax: CallSyntax, index: int, name: str, arguments: dict[str, Any]) -> str:
    match syntax.body:
        case JsonCall() as body:
            if body.name_is_key:
                return json.dumps({name: arguments})
            number = {body.id_key: str(index)} if body.id_key else {}
            text = json.dumps({**number, body.name_keys[0]: name, body.argument_keys[0]: arguments})
            return text[1:] if body.bare else text
        case NamedJson() as body:
            number_text = f":{index}" if body.numbered else ""
            ends = "".join(body.name_end), "".join(body.end)
            return f"{body.prefix}{name}{number_text}{ends[0]}{json.dumps(arguments)}{ends[1]}"
        case TaggedArguments() as body:
            items = "".join(_tagged(body, key, value) for key, value in arguments.items())
            return f"{name}{''.join(body.name_end)}{items}{''.join(body.end)}"
        case LiteralArguments() as body:
            items = body.separator.join(
                f"{key}{body.assign}{_literal(body, value)}" for key, value in arguments.items()
            )
            return f"{name}{body.open}{items}{body.close}"


def _tagged(body: TaggedArguments, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    key_end = body.string_key_end if is_text and body.string_key_end else body.key_end
    line = "\n" if body.lines else ""
    text = value if is_text else json.dumps(value)
    return f"{body.key_begin}{key}{''.join(key_end)}{line}{text}{line}{body.value_end}"


def _literal(body: LiteralArguments, value: Any) -> str:
    if isinstance(value, str) and len(body.quotes[0]) > 1:
        return f"{body.quotes[0]}{value}{body.quotes[0]}"
    return repr(value) if body.open == "(" else json.dumps(value)
