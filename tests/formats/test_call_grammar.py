"""Random walks under the grammars of tool calls: the parser reads them back, and they are valid."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

import asyncllm
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.formats import ModelFormat, resolve
from asyncllm.formats.call_grammar import written_syntax
from asyncllm.formats.families import TOOL_PARSERS
from asyncllm.formats.tools import Tool, ToolChoice
from tests.formats.answers import Answer, read
from tests.formats.test_families import CALLS

TINY = Path(asyncllm.__file__).parent / "assets" / "tiny" / "tokenizer.json"
MAX_TOKENS = 2000

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any text."},
        "colour": {"$ref": "#/$defs/Colour"},
        "count": {"type": "integer", "minimum": -20, "maximum": 2000},
        "on": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "tags": {"type": "array", "items": {
                "$ref": "#/$defs/Colour"}, "maxItems": 3}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"Colour": {"type": "string", "enum": ["red", "light \"green\"", "5"]}},
}  # fmt: skip
TOOLS = (
    Tool("paint", PARAMETERS, strict=True),
    Tool("clock", {"type": "object", "properties": {}, "additionalProperties": False}),
    Tool("paint_more", PARAMETERS),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
FORMATS = [*CALLS]


class Words:
    """A tokenizer as llguidance asks for it; added tokens that are not special are plain text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, raw: RawTokenizer) -> None:
        known = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>"))
        self.eos_token_id = known.eos_token_ids[0]
        self.tokens = [known.token_bytes(i) for i in range(known.vocab_size)]
        self.special_token_ids = sorted(known.special_ids)
        self._known = known

    def __call__(self, text: str) -> list[int]:
        return self._known.encode(text, add_special_tokens=False)


@cache
def tokenizer(special: frozenset[str]) -> tuple[RawTokenizer, llguidance.LLTokenizer]:
    """The built-in model's, with these special tokens too."""
    raw = RawTokenizer.from_file(str(TINY))
    raw.add_special_tokens(sorted(special))
    return raw, llguidance.LLTokenizer(Words(raw))


def special_markers(name: str) -> frozenset[str]:
    """The markers that look like special tokens."""
    markers = (marker.strip() for marker in TOOL_PARSERS[name].markers)
    found = {m for m in markers if m[:2] in ("<|", "<｜") or (m == m.upper() and len(m) > 3)}
    if name.startswith("deepseek_v") and name > "deepseek_v31":
        return frozenset({"｜DSML｜"})
    if name == "openai":
        return frozenset({*found, "<|constrain|>"} - {"<|channel|>analysis<|message|>"})
    return frozenset(found)


def known(name: str, special: frozenset[str]) -> ModelFormat:
    raw, _ = tokenizer(special)
    ids = {token.content: i for i, token in raw.get_added_tokens_decoder().items() if token.special}
    found = resolve(None, ids, tool_parser=name, reasoning_parser="none")
    assert found is not None
    assert found.keeps_special_tokens == bool(special)
    return found


def walk(grammar: str, special: frozenset[str], rng: random.Random) -> str:
    """A text that the grammar allows, up to its end of text: tokens at random, and likely ones."""
    raw, ll = tokenizer(special)
    matcher = llguidance.LLMatcher(ll, grammar)
    assert not matcher.is_error(), matcher.get_error()
    hints = likely_tokens(special)
    ids: list[int] = []
    while len(ids) < MAX_TOKENS:
        hurry = len(ids) > 60
        allowed = allowed_tokens(matcher)
        if ll.eos_token in allowed:
            if hurry or len(allowed) == 1 or rng.random() < 0.5:
                return raw.decode(ids, skip_special_tokens=False)
            allowed.remove(ll.eos_token)
        ids.append(rng.choice(allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
        for hint in rng.sample(hints, len(hints) if hurry else rng.randint(0, 1)):
            if not matcher.is_accepting():
                ids += hint[: matcher.try_consume_tokens(hint)]
    raise AssertionError(f"no end: {raw.decode(ids, skip_special_tokens=False)}")


@cache
def likely_tokens(special: frozenset[str]) -> list[list[int]]:
    raw, _ = tokenizer(special)
    return [raw.encode(hint, add_special_tokens=False).ids for hint in HINTS]


def allowed_tokens(matcher: llguidance.LLMatcher) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return list(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())


HINTS = [
    "</parameter>", "</arg_value>", '"', "}", "]", "}}", '<|"|>', "<escape>", "</tool_call>",
    "<|tool_arg:end|>", "</｜DSML｜parameter>", "</steptml:parameter>", "</param>", " 1", "2",
    "<|end|>", "colour", "place", "paint", "null",
]  # fmt: skip


def check(answer: Answer, min_calls: int = 1) -> None:
    assert answer.content == ""
    assert len(answer.calls) >= min_calls
    for name, arguments in answer.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.slow
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_read_back(name: str, is_special: bool) -> None:
    special = special_markers(name) if is_special else frozenset()
    found = known(name, special)
    grammar = found.call_grammar(ToolChoice(TOOLS, required=True))
    assert grammar is not None
    for seed in range(5):
        text = walk(grammar, special, random.Random(seed))
        answer = read(lambda: found.parser(TOOLS), [text])
        try:
            check(answer)
        except Exception as error:
            error.add_note(repr(text))
            raise


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_one_call(name: str) -> None:
    special = special_markers(name)
    found = known(name, special)
    grammar = found.call_grammar(ToolChoice(TOOLS[:1], required=True), parallel=False)
    assert grammar is not None
    for seed in range(3):
        answer = read(lambda: found.parser(TOOLS), [walk(grammar, special, random.Random(seed))])
        check(answer)
        assert [called for called, _ in answer.calls] == ["paint"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_constrains_what_begins_like_a_call(name: str) -> None:
    special = special_markers(name)
    found = known(name, special)
    grammar = found.call_grammar(ToolChoice(TOOLS))
    assert grammar is not None
    if name == "openai":
        begin = "<|channel|>commentary to=functions."
    else:
        syntax = written_syntax(found.format, found.special_tokens)
        begin = (syntax.begin + syntax.call_begin)[0].strip()
    if len(begin) > 1 and name != "openai":
        begin = f"Let me see. {begin}"
    raw, ll = tokenizer(special)
    matcher = llguidance.LLMatcher(ll, grammar)
    assert matcher.consume_tokens(raw.encode(begin, add_special_tokens=False).ids)
    assert not matcher.is_accepting()
    wrong = raw.encode(" I mean", add_special_tokens=False).ids
    assert matcher.try_consume_tokens(wrong) < len(wrong)


def test_free_text_under_auto() -> None:
    found = known("hermes", frozenset())
    grammar = found.call_grammar(ToolChoice(TOOLS))
    assert grammar is not None
    raw, ll = tokenizer(frozenset())
    for text in (
        "",
        "Hello <tool> [1] {2}",
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    ):
        matcher = llguidance.LLMatcher(ll, grammar)
        assert matcher.consume_tokens(raw.encode(text, add_special_tokens=False).ids)
        assert matcher.is_accepting()


def test_nothing_to_constrain() -> None:
    found = known("hermes", frozenset())
    assert found.call_grammar(ToolChoice()) is None
    assert found.call_grammar(ToolChoice(TOOLS[1:])) is None
