"""Texts between tags that are held to a schema: their regexes, and walks that are read back."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import llguidance
import pytest

from asyncllm.errors import InvalidRequestError
from asyncllm.formats.answer_format import LiteralArguments, TaggedArguments
from asyncllm.formats.families import TOOL_PARSERS
from asyncllm.formats.text_formats import TEXT_FORMATS
from asyncllm.formats.text_regex import searching, text_regexes
from asyncllm.formats.tools import Tool, ToolChoice
from tests.formats.answers import read
from tests.formats.test_call_grammar import known, special_markers, tokenizer, walk

ALPHABET = "ab|^$]x:\n0"
PATTERNS = [
    "a", "^a", "a$", "^a$", "^a|b$", "^(a|b)$", "a|^b", "^[^ab]+$", "[|^$]", r"\$|\^", r"^[\]|]+$",
    r"\d", "^(?:a|b)?x", "a{2}|b{3,}", "^.$", "x:", "^a*b?$", "", "^", "$", "^$", "(a|b)x|x",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_searched_for(pattern: str) -> None:
    rng = random.Random(pattern)
    whole = re.compile(searching(pattern))
    texts = ["".join(rng.choices(ALPHABET, k=rng.randrange(6))) for _ in range(400)]
    wanted = re.compile(re.sub(r"(?<!\\)\$(?!\])", r"\\Z", pattern))  # Python's $ lets \n follow
    found = {bool(wanted.search(text)) for text in texts}
    assert [
        text for text in texts if bool(wanted.search(text)) != bool(whole.fullmatch(text))
    ] == []
    assert True in found


@pytest.mark.parametrize(
    "pattern",
    [
        *("(^a)", "a^b", "a$b", "^(a$)", r"\bfoo", r"a\B", r"(a)\1", "(?=a)b", "(?!a)b", "(?<=a)b"),
        *("(?i)a", "[]a]", "[^]a]", "[[a]", "[a&&b]", "[a", "a\\", "\ud800", None, 5, ["a"]),
    ],
)
def test_what_cannot_be_said(pattern: Any) -> None:
    with pytest.raises(ValueError, match=r"^pattern$"):
        searching(pattern)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"format": "ipv6"}, "format"),
        ({"format": 5}, "format"),
        ({"minLength": -1}, "minLength"),
        ({"minLength": True}, "minLength"),
        ({"maxLength": 1.5}, "maxLength"),
        ({"minLength": 3, "maxLength": 2}, "maxLength"),
    ],
)
def test_keywords_that_cannot_be_kept(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ValueError, match=f"^{keyword}$"):
        text_regexes(schema)


GOOD = {
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "00:00:00.123+01:30"],
    "date-time": ["2024-01-31T10:00:00Z"],
    "duration": ["P3D", "PT5M", "P1Y2M3DT4H5M6S", "P2W", "PT1H"],
    "email": ["a.b+c@example.com", "x@localhost"],
    "hostname": ["a", "www.example-1.com"],
    "ipv4": ["0.0.0.0", "255.19.200.1"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["https://example.com:80/a/b?c=d&e#f", "http://a", "mailto:a@b", "urn:isbn:0-1"],
}
BAD = {
    "date": ["2023-02-29", "2024-13-01", "24-01-01", "2024-04-31"],
    "time": ["24:00:00Z", "10:00:00", "10:60:00Z", "10:00:00+24:00"],
    "date-time": ["2024-01-31 10:00:00Z", "2024-01-31T10:00:00"],
    "duration": ["P", "PT", "1D", "P1W2D", "P1Y3D", "PT1H5S"],
    "email": ["a", "@b", "a@", ".a@b", "a..b@c", "a@-b", "a@b "],
    "hostname": ["", "-a", "a-", "a..b", "a_b", "x" * 64],
    "ipv4": ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"],
    "uuid": ["123e4567e89b12d3a456426614174000", "g23e4567-e89b-12d3-a456-426614174000"],
    "uri": ["example.com", "//a", "http://", "http:// a", "a:b c", "http://a:port/", "a:%zz", ""],
}


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_formats(name: str) -> None:
    regex = re.compile(TEXT_FORMATS[name])
    assert [text for text in GOOD[name] if not regex.fullmatch(text)] == []
    assert [text for text in BAD[name] if regex.fullmatch(text)] == []


# --- in calls ------------------------------------------------------------------------------------

HELD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "short": {"type": "string", "minLength": 1, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-z<>/=]{2,5}$|^ID:[0-9]{2}$", "maxLength": 4},
        "day": {"type": "string", "format": "date"},
        "maybe": {"anyOf": [{"type": "string", "pattern": "^x+$", "maxLength": 9},
                            {"type": "null"}]},
        "either": {"type": ["string", "null"], "format": "ipv4"},
        "secret": {"type": "string", "format": "password"},
    },
    "required": ["short", "code", "day", "maybe", "either"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = Tool("hold", HELD, strict=True, param="tools[0].function.parameters")


def holds_texts(name: str) -> bool:
    """Whether the family writes texts as they are, for which regexes are needed."""
    syntaxes = TOOL_PARSERS[name].calls
    body = syntaxes[0].body if syntaxes else None
    literal = isinstance(body, LiteralArguments) and len(body.quotes[0]) > 1
    return literal or isinstance(body, TaggedArguments)


@pytest.mark.slow
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", list(filter(holds_texts, TOOL_PARSERS)))
def test_held_texts_are_read_back(name: str, is_special: bool) -> None:
    special = special_markers(name) if is_special else frozenset()
    found = known(name, special)
    grammar = found.call_grammar(ToolChoice((TOOL,), required=True), parallel=False)
    assert grammar is not None
    checker = jsonschema.FormatChecker(["date", "ipv4"])
    for seed in range(4):
        text = walk(grammar, special, random.Random(seed))
        answer = read(lambda: found.parser((TOOL,)), [text])
        ((called, arguments),) = answer.calls
        assert called == "hold", text
        jsonschema.validate(json.loads(arguments), HELD, format_checker=checker)


def test_the_closing_tag_ends_the_text_whatever_the_pattern_allows() -> None:
    """`.` matches a tag too; the first one ends the text all the same."""
    found = known("minicpm5", frozenset())
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x.*y$"}},
                  "required": ["a"]}  # fmt: skip
    tool = Tool("f", parameters, strict=True)
    grammar = found.call_grammar(ToolChoice((tool,), required=True), parallel=False)
    assert grammar is not None
    for text, fits in (("xy", True), ("x</param>y", False), ("x</para y", True), ("x", False)):
        call = f'<function name="f"><param name="a">{text}</param></function>'
        assert takes(grammar, call) == fits, text
        if fits:
            answer = read(lambda: found.parser((tool,)), [call])
            assert json.loads(answer.calls[0][1]) == {"a": text}


def takes(grammar: str, text: str) -> bool:
    raw, ll = tokenizer(frozenset())
    matcher = llguidance.LLMatcher(ll, grammar)
    ids = raw.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "format": "ipv6"}, "format"),
        ({"type": "string", "enum": ["a"], "maxLength": 5}, "maxLength"),
        ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer"}]}, "anyOf"),
        ({"anyOf": [{"type": "string", "format": "ipv6"}, {"type": "null"}]}, "format"),
    ],
)
def test_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    found = known("qwen3_coder", frozenset())
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = Tool("f", parameters, strict=True, param="tools[3].function.parameters")
    with pytest.raises(InvalidRequestError, match=f"'{keyword}' cannot be enforced") as caught:
        found.call_grammar(ToolChoice((tool,)))
    assert caught.value.param == "tools[3].function.parameters"
    loose = found.call_grammar(ToolChoice((Tool("f", parameters),), required=True))
    assert loose is not None
