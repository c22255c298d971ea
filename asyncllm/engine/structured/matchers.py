"""A grammar's matcher, or what is wrong with the grammar, in words for who sent it.

The library compiles within limits of its own, and takes some grammars that no text satisfies: those
are refused here, before a sequence follows one. It knows neither threads nor caches.
"""

from __future__ import annotations

import re
from functools import cache

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from asyncllm.engine.structured.constraint import is_dead_end
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.errors import InvalidRequestError, one_line
from asyncllm.formats.lark_text import noted_terminals
from asyncllm.structured_outputs import StructuredOutputsParams

MAX_ERROR_CHARS = 400

# What a complaint quotes, and where that stands. Of a schema, and of all but a client's own
# grammar, the text around it is ours.
_QUOTED_LINE = re.compile(r"\n\s*\d+ \| ")
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")

# The library's own bounds. A lexer's states take 1-2 kB each, and stay while a grammar is kept. A
# row's items take about 20 us each, and every row of the step waits for them: a schema with more
# choices in one place is refused, nearly always when it is compiled.
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_max_items=5_000, verbose_errors=False)


def first_matcher(vocabulary: Vocabulary, text: str, params: StructuredOutputsParams) -> LLMatcher:
    """The grammar's. Raises `InvalidRequestError` where nothing can satisfy it."""
    matcher = another_matcher(vocabulary, text)
    probe = matcher.deep_copy()
    probe.compute_bitmask()  # what no text satisfies shows here; it warms the copies' lexer
    forced = probe.compute_ff_tokens()
    if probe.is_error() or not probe.consume_tokens(forced[:1]):
        raise _refusal(params, probe.get_error().removesuffix("<non-verbose/>"))
    return matcher


def another_matcher(vocabulary: Vocabulary, text: str) -> LLMatcher:
    """With a lexer of its own, of a grammar that has had its first."""
    tokenizer = vocabulary.tokenizer_for(text)
    return LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)


def check_noted_terminals(text: str, params: StructuredOutputsParams) -> None:
    """Raises `InvalidRequestError` where one matches nothing: a text that came to it could not go
    on. What is too large to be looked at here shows there."""
    for grammar in orjson.loads(text)["grammars"]:
        for note, body in noted_terminals(grammar["lark_grammar"]):
            probe = LLMatcher(_bytes(), f"start: T\nT: {body}\n", log_level=0, limits=_LIMITS)
            probe.compute_bitmask()
            if is_dead_end(probe.get_error()):
                raise InvalidRequestError(f"{params.param}: no text satisfies {note}", params.param)


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _refusal(params: StructuredOutputsParams, complaint: str) -> InvalidRequestError:
    param = params.param
    if "oneOf constraints are not supported" in complaint:
        complaint = (
            "the keyword 'oneOf' cannot be enforced where options may overlap: use 'anyOf', or "
            "give the options a required property with different constants"
        )
    elif not complaint or is_dead_end(complaint):
        complaint = "no text satisfies it"
    elif params.kind != "grammar" or "JSON schema" in complaint:
        complaint = _PLACE.sub("", _QUOTED_LINE.split(complaint)[0])
    return InvalidRequestError(
        f"{param}: {one_line(ValueError(complaint)):.{MAX_ERROR_CHARS}}", param
    )
