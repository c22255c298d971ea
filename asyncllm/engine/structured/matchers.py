"""Makes the matcher of a grammar, or an error that tells the client what is wrong with it.

The library compiles within its own limits, and accepts some grammars that no text satisfies. They
are refused here, before a sequence uses one.
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

# The text and the place that an error of the library quotes. They are of our grammar, unless the
# client sent a grammar itself.
_QUOTED_LINE = re.compile(r"\n\s*\d+ \| ")
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")

# Limits for the library. A lexer's states take 1-2 kB each while a grammar is cached. The items of
# a row take about 20 us each, for which all rows of a step wait: a schema with more choices in one
# place is refused, nearly always when it is compiled.
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_max_items=5_000, verbose_errors=False)


def first_matcher(vocabulary: Vocabulary, text: str, params: StructuredOutputsParams) -> LLMatcher:
    """The first matcher of a grammar. Raises `InvalidRequestError` if no text satisfies it."""
    matcher = another_matcher(vocabulary, text)
    probe = matcher.deep_copy()
    probe.compute_bitmask()  # fails if no text satisfies it; warms the lexer of the copies
    forced = probe.compute_ff_tokens()
    if probe.is_error() or not probe.consume_tokens(forced[:1]):
        raise _refusal(params, probe.get_error().removesuffix("<non-verbose/>"))
    return matcher


def another_matcher(vocabulary: Vocabulary, text: str) -> LLMatcher:
    """A further matcher of the same grammar, with its own lexer."""
    tokenizer = vocabulary.tokenizer_for(text)
    return LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)


def check_noted_terminals(text: str, params: StructuredOutputsParams) -> None:
    """Raise `InvalidRequestError` for a terminal that matches nothing, at which a text could not
    continue. Terminals that are too large to check fail at that point."""
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
