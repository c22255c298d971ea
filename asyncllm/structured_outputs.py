"""Constraints on the text of an answer: a JSON schema, a regex, a choice or a grammar.

The names are vLLM's. The constructors check types, sizes, and that exactly one constraint is given.
When the request arrives, the engine compiles the constraint and refuses what it cannot enforce.
Errors name the field as `structured_outputs.<field>`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import orjson

from asyncllm.errors import InvalidRequestError

MAX_STRUCTURED_OUTPUT_CHARS = 2**18  # in a schema, a regex, a grammar or all choices
MAX_STRUCTURED_OUTPUT_DEPTH = 100  # of the JSON of a schema or structural tag
MAX_CHOICES = 4096
MAX_WHITESPACE_PATTERN_CHARS = 128
MAX_REASONING_MARKER_CHARS = 128

PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True, frozen=True)
class ReasoningMarkers:
    """The texts around reasoning that may precede the answer that a grammar describes.

    end    closes the reasoning. The grammar begins after it and at most two newlines, which belong
           to neither part.
    begin  opens the reasoning. None means that the prompt opened it, so that `end` must come.
           Otherwise the model decides whether it reasons or answers at once.
    resumed, header   for models whose answers are messages: `header` opens the answer, with and
           without reasoning, and `resumed` stands between the reasoning and `header`. No newlines
           are allowed then.
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
    """One constraint: exactly one of the fields in `KINDS`.

    json            a JSON schema, as a dict or as text
    regex           matches the whole text (Rust's syntax: no look-around, no back-references)
    choice          the texts of which one is the answer
    grammar         Lark as llguidance reads it (with `%json {...}` and special tokens), or GBNF as
                    llama.cpp writes it; their rules have `:` and `::=`
    json_object     any JSON object
    structural_tag  free text with constrained parts, as JSON: {"structures", "triggers"} or
                    {"type": "structural_tag", "format"}
    The `disable_*` fields and `whitespace_pattern` change which JSON is allowed. Two fields are not
    vLLM's: `after` allows reasoning before the answer, and `alternative` is a Lark grammar for
    another form of the answer (a chat's tool calls), with its own reasoning if `after` has a
    header. Raises `InvalidRequestError` (a `ValueError`) naming the field.
    Source: vllm.sampling_params.StructuredOutputsParams.
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
    """The one of `KINDS` that is given."""

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
    """Whether it is a non-empty str without lone surrogates."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(value: Any, field_name: str) -> dict[str, Any]:
    """A checked copy of a JSON object, which `value` is or is the text of."""
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
