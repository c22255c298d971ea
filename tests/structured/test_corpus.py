"""Whatever tokens the grammar of a schema allows, the text they make is valid by that schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.engine.structured.compiler import CompiledGrammar
from asyncllm.engine.text.tokenizer import Tokenizer
from tests.structured.corpus import CORPUS, is_valid
from tests.structured.walks import walk

NUM_WALKS = 12


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_every_way_through_is_valid(
    name: str, tokenizer: Tokenizer, compiled: Callable[..., CompiledGrammar]
) -> None:
    grammar = compiled(json=CORPUS[name])
    num_complete = 0
    for seed in range(NUM_WALKS):
        steps = walk(grammar.constraint(False), tokenizer, seed)
        if steps.complete:
            num_complete += 1
            value = json.loads(steps.text)
            assert is_valid(CORPUS[name], value), steps.text
    assert num_complete >= NUM_WALKS * 3 // 4


@pytest.mark.parametrize(
    ("fields", "spaces"),
    [
        ({"disable_any_whitespace": True}, ""),
        ({"whitespace_pattern": " "}, " "),
        ({"whitespace_pattern": r"[ \n]{1,3}"}, " \n"),
        ({}, " \n\t\r"),
    ],
)
def test_whitespace(
    fields: dict[str, Any],
    spaces: str,
    tokenizer: Tokenizer,
    compiled: Callable[..., CompiledGrammar],
) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    grammar = compiled(json=schema, **fields)
    seen: set[str] = set()
    for seed in range(20):
        steps = walk(grammar.constraint(False), tokenizer, seed)
        assert steps.complete
        seen |= {character for character in steps.text if character.isspace()}
        assert len(json.loads(steps.text)) == 3
    assert seen == set(spaces)


def test_additional_properties_are_switched_off(
    tokenizer: Tokenizer, compiled: Callable[..., CompiledGrammar]
) -> None:
    """Wherever properties are listed and nothing is said, below too; a plain map stays a map."""
    schema = {
        "type": "object",
        "properties": {"inner": {"type": "object", "properties": {"a": {"type": "null"}}}},
        "required": ["inner"],
    }
    grammar = compiled(json=schema, disable_additional_properties=True)
    for seed in range(20):
        value = json.loads(walk(grammar.constraint(False), tokenizer, seed).text)
        assert value.keys() == {"inner"}
        assert value["inner"].keys() <= {"a"}


def test_json_object(tokenizer: Tokenizer, compiled: Callable[..., CompiledGrammar]) -> None:
    grammar = compiled(json_object=True)
    walks = [walk(grammar.constraint(False), tokenizer, seed, stay_short=1) for seed in range(20)]
    values = [json.loads(steps.text) for steps in walks if steps.complete]
    assert values
    assert all(isinstance(value, dict) for value in values)
