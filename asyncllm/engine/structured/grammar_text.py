"""Writes the grammar for llguidance of a request's structured output.

The same parameters always give the same text. Errors name the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.engine.structured.forced_text import (
    lark_forces_little,
    regex_forces_little,
    schema_forces_little,
)
from asyncllm.engine.structured.gbnf import any_to_lark
from asyncllm.engine.structured.json_schema import enforceable_schema
from asyncllm.engine.structured.lark import LarkBuilder, quoted
from asyncllm.engine.structured.structural_tag import StructuralTagCompiler
from asyncllm.structured_outputs import PARAM, ReasoningMarkers, StructuredOutputsParams, parse_json

# White space between two parts of a JSON text. It is bounded, as a model may write newlines until
# its tokens are used up.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
AFTER_REASONING = r"/\n{0,2}/"


def grammar_text(params: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    """special_ids: the special tokens by their text. Raises `InvalidRequestError`."""
    builder = LarkBuilder(special_ids)
    if params.kind == "grammar" and params.after is None and params.alternative is None:
        lark, forcing = _own_grammar(params)
        return builder.own_grammars(lark, forcing=forcing)
    answer, forcing = _ANSWERS[params.kind](params, builder)
    if params.alternative is not None:
        forcing = forcing and lark_forces_little(params.alternative)
    return builder.grammars(_whole(params, builder, answer), forcing=forcing)


def _whole(params: StructuredOutputsParams, builder: LarkBuilder, answer: str) -> str:
    """The answer or its alternative, with the reasoning before it."""
    markers = params.after
    other = "" if params.alternative is None else f" | {builder.lark(params.alternative)}"
    if markers is not None and markers.header:  # for messages; the alternative has its own headers
        before = f"{builder.text_until(markers.end)} {builder.literal(markers.resumed)}"
        answer = f"{builder.literal(markers.header)} {answer}"
        return f"{_after(markers, builder, before)} {answer}{other}"
    answer = f"({answer}{other})" if other else answer
    if markers is None:
        return answer
    before = f"{builder.text_until(markers.end)} {builder.rule(AFTER_REASONING)}"
    return f"{_after(markers, builder, before)} {answer}"


def _after(markers: ReasoningMarkers, builder: LarkBuilder, before: str) -> str:
    """before: the rest of the reasoning, which must come if the prompt has begun it."""
    return before if markers.begin is None else f"({builder.literal(markers.begin)} {before})?"


def _json(params: StructuredOutputsParams, builder: LarkBuilder) -> tuple[str, bool]:
    schema = parse_json(params.json, "json")
    enforceable_schema(
        schema, f"{PARAM}.json", close_objects=bool(params.disable_additional_properties)
    )
    forcing = schema_forces_little(schema)
    return builder.value_of(schema, _json_options(params)), forcing


def _json_object(params: StructuredOutputsParams, builder: LarkBuilder) -> tuple[str, bool]:
    return builder.value_of({"type": "object"}, _json_options(params)), True


def _regex(params: StructuredOutputsParams, builder: LarkBuilder) -> tuple[str, bool]:
    assert params.regex is not None
    return builder.regex(params.regex), regex_forces_little(params.regex)


def _choice(params: StructuredOutputsParams, builder: LarkBuilder) -> tuple[str, bool]:
    """A single terminal, so that of choices with the same beginning the longest remains
    possible."""
    assert params.choice is not None
    forcing = all(map(regex_forces_little, params.choice))
    return builder.terminal(" | ".join(map(quoted, params.choice))), forcing


def _grammar(params: StructuredOutputsParams, builder: LarkBuilder) -> tuple[str, bool]:
    lark, forcing = _own_grammar(params)
    return builder.lark(lark), forcing


def _own_grammar(params: StructuredOutputsParams) -> tuple[str, bool]:
    assert params.grammar is not None
    lark = any_to_lark(params.grammar, f"{PARAM}.grammar")
    return lark, lark_forces_little(lark)


def _structural_tag(params: StructuredOutputsParams, builder: LarkBuilder) -> tuple[str, bool]:
    tag = parse_json(params.structural_tag, "structural_tag")
    close_objects = bool(params.disable_additional_properties)
    compiler = StructuralTagCompiler(builder, _json_options(params), close_objects)
    return compiler.expression(tag), schema_forces_little(tag)


_ANSWERS = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
