"""Forms that a request may ask its text to have: JSON by a schema, a regex, a choice, a grammar.

vLLM's names. Checked when made for what needs no model: types, sizes, that one thing is asked.
Whether it compiles, and whether all of it can be enforced, the engine says when the request
arrives. A field that cannot be served is an error that names it: `structured_outputs.<field>`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import orjson

from asyncllm.errors import InvalidRequestError

MAX_STRUCTURED_OUTPUT_CHARS = 2**18  # of a schema, a regex, a grammar or all choices together
MAX_STRUCTURED_OUTPUT_DEPTH = 100  # of a schema's or structural tag's nested JSON
MAX_CHOICES = 4096
MAX_WHITESPACE_PATTERN_CHARS = 128
MAX_REASONING_MARKER_CHARS = 128

PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True, frozen=True)
class ReasoningMarkers:
    """Text around the reasoning that may come before the answer that a grammar describes.

    end    closes the reasoning; the grammar begins after it, and after at most two newlines, which
           belong to neither: whoever splits the text takes them off
    begin  opens it. With None the prompt has opened it: `end` must come. With a text the model
           decides: either `begin`, reasoning and `end` come first, or the answer comes at once.
    resumed, header   of models whose answers are messages: `resumed` stands between the reasoning
           and `header`, which opens the answer with and without reasoning. Then no newlines do.
    """

    end: str
    begin: str | None = None
    resumed: str = ""
    header: str = ""

    def __post_init__(self) -> None:
        wanted = f"markers of 1 to {MAX_REASONING_MARKER_CHARS} characters"
        begin = () if self.begin is None else (self.begin,)
        for text in (self.end, *begin, *filter(None, (self.resumed, self.header))):
            _require(is_text(text) and len(text) <= MAX_REASONING_MARKER_CHARS, "after", wanted)


@dataclass(slots=True)
class StructuredOutputsParams:
    """Exactly one of the first six fields. Source: vllm.sampling_params.StructuredOutputsParams.

    json            a JSON schema, as a dict or as text
    regex           the whole text matches it (Rust's syntax: no look-around, no back-references)
    choice          the text is one of these
    grammar         Lark as llguidance reads it (`%json {...}` and special tokens included), or
                    GBNF as llama.cpp writes it: told apart by their rules' `:` and `::=`
    json_object     any JSON object
    structural_tag  free text with constrained parts, as JSON: {"structures", "triggers"} or
                    {"type": "structural_tag", "format"}
    The next three change what JSON is allowed. Not vLLM's: `after` lets reasoning come first, and
    `alternative` is Lark of what the answer may be instead (a chat's tool calls), with its own
    reasoning where `after` has a header.
    Raises `InvalidRequestError` (a `ValueError`) naming the field.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    after: ReasoningMarkers | None = None
    alternative: str | None = None
    kind: str = field(init=False, repr=False, compare=False)
    """The one of `KINDS` that is asked."""

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            _require(isinstance(value, bool | None), name, "a bool", value)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            shown = ", ".join(given) if given else "none"
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, got {shown}", PARAM
            )
        self.kind = given[0]
        self._check_text()
        self._check_options()

    @property
    def param(self) -> str:
        """The name of the field, for errors."""
        return f"{PARAM}.{self.kind}"

    def _check_text(self) -> None:
        value, name = getattr(self, self.kind), self.kind
        if name in ("regex", "grammar"):
            _require(is_text(value), name, "a text", value)
            _check_chars(len(value), name)
        elif name == "choice":
            self._check_choice(value)
        elif name in ("json", "structural_tag"):
            parse_json(value, name)

    def _check_choice(self, value: Any) -> None:
        most = f"a list of 1 to {MAX_CHOICES} texts"
        _require(isinstance(value, list) and 0 < len(value) <= MAX_CHOICES, "choice", most, value)
        for text in value:
            _require(is_text(text), "choice", "texts", text)
        _check_chars(sum(map(len, value)), "choice")

    def _check_options(self) -> None:
        pattern, name = self.whitespace_pattern, "whitespace_pattern"
        if pattern is not None:
            _require(
                is_text(pattern) and len(pattern) <= MAX_WHITESPACE_PATTERN_CHARS,
                name,
                f"a regex of 1 to {MAX_WHITESPACE_PATTERN_CHARS} characters",
                pattern,
            )
            _require(not self.disable_any_whitespace, name, "left out with disable_any_whitespace")
        if self.alternative is not None:
            _require(is_text(self.alternative), "alternative", "a text", self.alternative)
            _check_chars(len(self.alternative), "alternative")
        is_markers = isinstance(self.after, ReasoningMarkers | None)
        _require(is_markers, "after", "ReasoningMarkers", self.after)


def is_text(value: Any) -> TypeGuard[str]:
    """Not empty, and Unicode: without lone surrogates."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(value: Any, field_name: str) -> dict[str, Any]:
    """A copy of the JSON object that `value` is, or is the text of; within the named limits."""
    _require(isinstance(value, str | dict), field_name, "a JSON object", value)
    try:
        text = value.encode() if isinstance(value, str) else orjson.dumps(value)
        _check_chars(len(text), field_name)
        parsed = orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(
            f"{PARAM}.{field_name} is no JSON: {error}", f"{PARAM}.{field_name}"
        ) from None
    _require(isinstance(parsed, dict), field_name, "a JSON object", parsed)
    _check_depth(parsed, field_name)
    return parsed


def _check_depth(parsed: Any, field_name: str) -> None:
    level: list[Any] = [parsed]
    for _ in range(MAX_STRUCTURED_OUTPUT_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    _require(False, field_name, f"nested at most {MAX_STRUCTURED_OUTPUT_DEPTH} deep")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _check_chars(num_chars: int, field_name: str) -> None:
    most = MAX_STRUCTURED_OUTPUT_CHARS
    _require(num_chars <= most, field_name, f"at most {most} characters", num_chars)


def _require(ok: bool, field_name: str, wanted: str, value: object = None) -> None:
    if not ok:
        got = "" if value is None else f", got {reprlib.repr(value)}"
        name = f"{PARAM}.{field_name}"
        raise InvalidRequestError(f"{name} must be {wanted}{got}", name)
