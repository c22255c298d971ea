"""Whether a grammar accepts a text, token by token."""

from __future__ import annotations

from asyncllm.engine.structured.compiler import CompiledGrammar
from asyncllm.engine.text.tokenizer import Tokenizer


def fits(grammar: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """The whole text, special tokens in it as such, and that it may end there."""
    matcher = grammar.matchers[0].deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
