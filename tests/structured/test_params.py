"""`StructuredOutputsParams` refuses by itself, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import InvalidRequestError, ReasoningMarkers, SamplingParams, StructuredOutputsParams
from asyncllm.structured_outputs import (
    MAX_CHOICES,
    MAX_REASONING_MARKER_CHARS,
    MAX_STRUCTURED_OUTPUT_CHARS,
    MAX_STRUCTURED_OUTPUT_DEPTH,
    MAX_WHITESPACE_PATTERN_CHARS,
)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json": {"type": "object"}}, "json"),
        ({"json": '{"type": "object"}'}, "json"),
        ({"json": nested(MAX_STRUCTURED_OUTPUT_DEPTH)}, "json"),
        ({"regex": "a" * MAX_STRUCTURED_OUTPUT_CHARS}, "regex"),
        ({"choice": ["a"] * MAX_CHOICES}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"json_object": True}, "json_object"),
        ({"json_object": False, "regex": "a"}, "regex"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag"),
        ({"json_object": True, "after": ReasoningMarkers("</think>")}, "json_object"),
        ({"json_object": True, "whitespace_pattern": " " * MAX_WHITESPACE_PATTERN_CHARS},
         "json_object"),
    ],
)  # fmt: skip
def test_what_is_asked(fields: dict[str, Any], kind: str) -> None:
    params = StructuredOutputsParams(**fields)
    assert params.kind == kind
    assert SamplingParams(structured_outputs=params).structured_outputs is params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"json": "true"}, "structured_outputs.json"),
        ({"json": "[" * 10_000}, "structured_outputs.json"),
        ({"json": '"\ud800"'}, "structured_outputs.json"),
        ({"json": {1: 2}}, "structured_outputs.json"),
        ({"json": {"enum": {1, 2}}}, "structured_outputs.json"),
        ({"json": 5}, "structured_outputs.json"),
        ({"json": nested(MAX_STRUCTURED_OUTPUT_DEPTH + 1)}, "structured_outputs.json"),
        ({"json": {"title": "x" * MAX_STRUCTURED_OUTPUT_CHARS}}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"grammar": "\ud800"}, "structured_outputs.grammar"),
        ({"choice": ["a", "\udfff"]}, "structured_outputs.choice"),
        ({"json_object": True, "whitespace_pattern": "\ud800"},
         "structured_outputs.whitespace_pattern"),
        ({"regex": "a" * (MAX_STRUCTURED_OUTPUT_CHARS + 1)}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice"),
        ({"choice": ["a" * MAX_STRUCTURED_OUTPUT_CHARS, "b"]}, "structured_outputs.choice"),
        ({"grammar": {}}, "structured_outputs.grammar"),
        ({"json_object": "yes"}, "structured_outputs.json_object"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ({"regex": "a", "whitespace_pattern": 3}, "structured_outputs.whitespace_pattern"),
        ({"regex": "a", "whitespace_pattern": " " * (MAX_WHITESPACE_PATTERN_CHARS + 1)},
         "structured_outputs.whitespace_pattern"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
         "structured_outputs.whitespace_pattern"),
        ({"regex": "a", "disable_any_whitespace": 1},
         "structured_outputs.disable_any_whitespace"),
        ({"regex": "a", "after": "</think>"}, "structured_outputs.after"),
        ({"regex": "a", "alternative": ""}, "structured_outputs.alternative"),
        ({"regex": "a", "alternative": "x" * (MAX_STRUCTURED_OUTPUT_CHARS + 1)},
         "structured_outputs.alternative"),
    ],
)  # fmt: skip
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("end", "begin"),
    [
        ("", None),
        (None, None),
        ("x", ""),
        ("\ud800", None),
        ("x" * (MAX_REASONING_MARKER_CHARS + 1), None),
    ],
)
def test_markers_are_texts(end: Any, begin: Any) -> None:
    with pytest.raises(InvalidRequestError, match="markers"):
        ReasoningMarkers(end, begin)


def test_other_types_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
