"""Random walks through a grammar, without a model: which tokens may come, and one of them taken."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np

from asyncllm.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from asyncllm.engine.structured.constraint import GrammarConstraint
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class Walk:
    token_ids: list[int]
    text: str
    complete: bool


def compile_now(compiler: GrammarCompiler, params: StructuredOutputsParams) -> CompiledGrammar:
    return asyncio.run(compiler.compile_async(params))


def new_constraint(
    compiler: GrammarCompiler, params: StructuredOutputsParams, ignore_eos: bool = False
) -> GrammarConstraint:
    return compile_now(compiler, params).constraint(ignore_eos)


def accept(constraint: GrammarConstraint, token_id: int) -> None:
    (error,) = GrammarConstraint.accept_many([constraint], [[token_id]])
    if error is not None:
        raise error


def fill(constraint: GrammarConstraint, bitmask: np.ndarray) -> None:
    (error,) = GrammarConstraint.fill_many([constraint], bitmask.reshape(1, -1))
    if error is not None:
        raise error


def allowed_ids(constraint: GrammarConstraint, vocab_size: int) -> np.ndarray:
    bitmask = np.zeros(-(-vocab_size // 32), np.int32)
    fill(constraint, bitmask)
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))


def walk(
    constraint: GrammarConstraint,
    tokenizer: Tokenizer,
    seed: int,
    max_tokens: int = 400,
    stay_short: float = 0.5,
) -> Walk:
    """Uniform over the allowed tokens, but a quote and the end of the text more often."""
    rnd = random.Random(seed)
    token_ids: list[int] = []
    ends = set(tokenizer.eos_token_ids)
    (quote,) = tokenizer.encode('"', False)
    while len(token_ids) < max_tokens:
        allowed = allowed_ids(constraint, tokenizer.vocab_size).tolist()
        others = [i for i in allowed if i not in ends]
        if len(others) < len(allowed) and (not others or rnd.random() < stay_short):
            accept(constraint, next(i for i in allowed if i in ends))
            return Walk(token_ids, tokenizer.decode(token_ids, False), True)
        takes_quote = quote in others and rnd.random() < stay_short / 2
        token_ids.append(quote if takes_quote else rnd.choice(others))
        accept(constraint, token_ids[-1])
    return Walk(token_ids, tokenizer.decode(token_ids, False), False)
