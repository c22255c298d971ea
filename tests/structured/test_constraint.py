"""The constraint against a slow oracle, where it ends, and what it says of impossible tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from asyncllm.engine.structured.compiler import CompiledGrammar, GrammarCompiler
from asyncllm.engine.structured.constraint import GrammarConstraint
from asyncllm.engine.structured.vocabulary import Vocabulary
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import InvalidRequestError
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.structured.walks import accept, allowed_ids, fill, new_constraint, walk

Compiled = Callable[..., CompiledGrammar]
EOS = 2
# The regex, and one that matches exactly the beginnings of what it matches.
BEGINNINGS = {
    "[0-9]{1,3}(kg|lb)": "([0-9]{0,3}|[0-9]{1,3}(k|kg|l|lb))",
    "(red|green)( (red|green)){0,2}": (
        "((red|green) ){0,2}(|r|re|red|g|gr|gre|gree|green)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("regex", BEGINNINGS)
def test_mask_is_what_can_continue(
    regex: str, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """At each position of a few walks, each token of the vocabulary, by matching its text."""
    beginning = re.compile(BEGINNINGS[regex])
    # Quantified, so that nothing is forced: a forced text is cut into the same tokens always.
    for seed in range(4):
        steps = walk(
            new_constraint(compiler, StructuredOutputsParams(regex=regex)), tokenizer, seed
        )
        constraint = new_constraint(compiler, StructuredOutputsParams(regex=regex))
        text = b""
        for token_id in [*steps.token_ids, None]:
            allowed = set(allowed_ids(constraint, tokenizer.vocab_size).tolist())
            can_end = re.fullmatch(regex, text.decode()) is not None
            assert (EOS in allowed) == can_end
            fitting = {
                i
                for i in range(tokenizer.vocab_size)
                if i not in tokenizer.special_ids
                and tokenizer.token_bytes(i)
                and beginning.fullmatch(
                    (text + tokenizer.token_bytes(i)).decode("utf-8", "replace")
                )
            }
            assert allowed - {EOS} <= fitting
            # Fewer only where a single text is forced, and then there is one.
            assert allowed - {EOS} == fitting or len(allowed - {EOS}) == 1
            if token_id is not None:
                accept(constraint, token_id)
                text += tokenizer.token_bytes(token_id)


def test_only_the_end_is_left_when_the_grammar_is_complete(
    tokenizer: Tokenizer, compiled: Compiled
) -> None:
    constraint = compiled(choice=["yes"]).constraint(False)
    for token_id in tokenizer.encode("yes", False):
        assert EOS not in allowed_ids(constraint, tokenizer.vocab_size)
        accept(constraint, token_id)
    for _ in range(2):
        assert allowed_ids(constraint, tokenizer.vocab_size).tolist() == [EOS]
        assert constraint.forced_tokens() == []
        accept(constraint, EOS)


def test_an_ignored_end_comes_only_when_it_must(tokenizer: Tokenizer, compiled: Compiled) -> None:
    grammar = compiled(regex="a{1,3}")
    ignoring, plain = grammar.constraint(True), grammar.constraint(False)
    (one,) = tokenizer.encode("a", False)
    for num in range(1, 4):
        accept(ignoring, one)
        accept(plain, one)
        assert EOS in allowed_ids(plain, tokenizer.vocab_size)
        assert (EOS in allowed_ids(ignoring, tokenizer.vocab_size)) == (num == 3)


def test_a_token_that_may_not_come_is_an_error(tokenizer: Tokenizer, compiled: Compiled) -> None:
    constraint = compiled(choice=["yes", "no"]).constraint(False)
    with pytest.raises(ValueError, match="token"):
        accept(constraint, tokenizer.encode("z", False)[0])
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.choice"):
        allowed_ids(constraint, tokenizer.vocab_size)


DEAD_END = {"grammar": 'start: "ab" END\nEND: /a/ & /bbb/'}


def test_where_nothing_satisfies_it_is_the_requests_own_error(
    tokenizer: Tokenizer, compiled: Compiled
) -> None:
    constraint = compiled(**DEAD_END).constraint(False)
    accept(constraint, tokenizer.encode("ab", False)[0])
    for _ in range(2):
        with pytest.raises(
            InvalidRequestError, match=r"^structured_outputs.grammar: the text"
        ) as e:
            allowed_ids(constraint, tokenizer.vocab_size)
        assert e.value.param == "structured_outputs.grammar"


@pytest.mark.slow
def test_a_limit_of_the_library_is_the_requests_own_error(
    tokenizer: Tokenizer, compiled: Compiled
) -> None:
    """Found when a token is taken, not when a mask is filled. Many equal rules reach it after few
    tokens: the time of each grows with those before it."""
    sums = [f"sum{i}" for i in range(40)]
    rules = ["start: e", f"e: {' | '.join(sums)} | /[0-9]/", *(f'{s}: e "+" e' for s in sums)]
    grammar = compiled(grammar="\n".join(rules))
    constraint = grammar.constraint(False)
    (one,), (plus,) = tokenizer.encode("1", False), tokenizer.encode("+", False)
    with pytest.raises(InvalidRequestError, match=r"row has \d+ items") as found:
        for _ in range(100):
            accept(constraint, one)
            accept(constraint, plus)
    assert found.value.param == "structured_outputs.grammar"
    (error,) = GrammarConstraint.accept_many([constraint], [[one]])
    assert isinstance(error, InvalidRequestError)


def test_constraints_of_one_grammar_are_apart(tokenizer: Tokenizer, compiled: Compiled) -> None:
    grammar = compiled(choice=["ab", "ba"])
    one, other = grammar.constraint(False), grammar.constraint(False)
    before = allowed_ids(other, tokenizer.vocab_size).tolist()
    accept(one, tokenizer.encode("a", False)[0])
    assert allowed_ids(other, tokenizer.vocab_size).tolist() == before
    assert allowed_ids(one, tokenizer.vocab_size).tolist() == tokenizer.encode("b", False)


def test_many_rows_at_once_are_each_row(tokenizer: Tokenizer, compiled: Compiled) -> None:
    """With one token to accept each, with none, and with several."""
    grammars = [compiled(regex="[a-c]+"), compiled(choice=["x"]), compiled(json_object=True)]
    token_ids = [tokenizer.encode("a", False), [], tokenizer.encode("{", False)]
    token_ids.append([token for char in "abc" for token in tokenizer.encode(char, False)])
    num_words = -(-tokenizer.vocab_size // 32)
    many = [
        [grammar.constraint(i == 0) for i, grammar in enumerate([*grammars, grammars[0]])]
        for _ in range(2)
    ]
    together = np.zeros((6, num_words), np.int32)[1:5]
    assert GrammarConstraint.accept_many(many[0], token_ids) == [None] * 4
    assert GrammarConstraint.fill_many(many[0], together) == [None] * 4
    apart = np.zeros((4, num_words), np.int32)
    for constraint, ids, row in zip(many[1], token_ids, apart, strict=True):
        for token_id in ids:
            accept(constraint, token_id)
        fill(constraint, row)
    assert (together == apart).all()
    assert together.any(axis=1).all()


def test_failing_rows_are_reported_and_the_others_are_filled(
    tokenizer: Tokenizer, compiled: Compiled
) -> None:
    grammar = compiled(choice=["yes", "no"])
    good, refused, broken, jumped = (grammar.constraint(False) for _ in range(4))
    (z,) = tokenizer.encode("z", False)
    with pytest.raises(ValueError, match="token"):
        accept(broken, z)
    rows = np.zeros((4, -(-tokenizer.vocab_size // 32)), np.int32)
    constraints = [refused, good, broken, jumped]
    errors = GrammarConstraint.accept_many(constraints, [[z], [], [], [z, z]])
    assert isinstance(errors[0], ValueError) and f"token {z}:" in str(errors[0])
    assert errors[1] is errors[2] is None
    assert isinstance(errors[3], ValueError) and f"token {z}, {z}:" in str(errors[3])
    errors = GrammarConstraint.fill_many(constraints, rows)
    assert errors[1] is None
    assert all(isinstance(errors[i], InvalidRequestError) for i in (0, 2, 3))
    assert np.unpackbits(rows[1].view(np.uint8)).sum() >= 2


def test_forced_tokens_are_what_the_mask_would_force(
    tokenizer: Tokenizer, compiled: Compiled
) -> None:
    """Jumping over them or sampling them one by one is the same."""
    schema = {
        "type": "object",
        "properties": {"temperature_in_celsius": {"type": "integer"}},
        "required": ["temperature_in_celsius"],
        "additionalProperties": False,
    }
    grammar = compiled(json=schema, disable_any_whitespace=True)
    jumping, stepping = grammar.constraint(False), grammar.constraint(False)
    forced = jumping.forced_tokens()
    assert tokenizer.decode(forced, False).startswith('{"temperature')
    for token_id in forced:
        assert allowed_ids(stepping, tokenizer.vocab_size).tolist() == [token_id]
        accept(stepping, token_id)
        accept(jumping, token_id)
    assert jumping.forced_tokens() == []


@pytest.mark.parametrize("text", ["<|im_end|>", "say <|im_start|> twice", "<|endoftext|>x"])
def test_a_special_tokens_text_is_text(text: str, tokenizer: Tokenizer, compiled: Compiled) -> None:
    constraint = compiled(choice=[text]).constraint(False)
    steps = walk(constraint, tokenizer, seed=0)
    assert steps.complete and steps.text == text
    assert tokenizer.special_ids.isdisjoint(steps.token_ids)


def test_more_logits_than_tokens_and_fewer(tokenizer: Tokenizer) -> None:
    for vocab_size in (tokenizer.vocab_size + 77, 1000):
        vocabulary = Vocabulary(tokenizer, vocab_size, tokenizer.eos_token_ids)
        compiler = GrammarCompiler(lambda v=vocabulary: v)  # type: ignore[misc]
        constraint = new_constraint(compiler, StructuredOutputsParams(regex="(?s:.*)"))
        allowed = allowed_ids(constraint, vocab_size)
        assert len(allowed) > 100 and allowed.max() < min(vocab_size, tokenizer.vocab_size)
