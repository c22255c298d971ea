"""Streams of JSON by a schema for bench_host.py: real grammars, and what a model would say to them.

The answers are written before: valid records, cut into tokens as the grammar forces them or, where
it does not, as the tokenizer would. So each row's mask is filled in states as they come in real
answers, and the simulated device needs no sampler.
"""

from __future__ import annotations

import json
import random
from typing import Any

from asyncllm import StructuredOutputsParams
from asyncllm.engine.engine_core import EngineCore
from asyncllm.types import Request, Sequence

NUM_ANSWERS = 16
ANSWER_TOKENS = 1500
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["small", "medium", "large"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 1000}
WORDS = ("the", "river", "hills", "of", "north", "where", "old", "Alice", "keeps", "a", "lamp")


class JsonStreams:
    """Gives each request of an engine the grammar; `answer` is what its sequence will say."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._grammar = core.input_processor.grammars.compile(StructuredOutputsParams(json=SCHEMA))
        rng = random.Random(0)
        self._answers = [self._tokens(_text(rng)) for _ in range(NUM_ANSWERS)]
        self._process = core.input_processor.process
        core.input_processor.process = self._with_grammar  # type: ignore[assignment,method-assign]

    def answer(self, seq: Sequence) -> list[int]:
        return self._answers[seq.seq_id % NUM_ANSWERS]

    async def _with_grammar(self, *args: Any) -> Request:
        request = await self._process(*args)
        for seq in request.sequences:
            seq.constraint = self._grammar.constraint(ignore_eos=True)
        return request

    def _tokens(self, text: str) -> list[int]:
        tokenizer = self._core.input_processor.tokenizer
        assert tokenizer is not None
        constraint = self._grammar.constraint(ignore_eos=True)
        ids: list[int] = []
        done = 0
        while len(ids) < ANSWER_TOKENS:
            near = text[done : done + 40]
            more = constraint.forced_tokens()[:1] or tokenizer.encode(near, False)[:1]
            constraint.accept_many([constraint], [more])
            ids += more
            done += len(tokenizer.decode(more))
        return ids


def _text(rng: random.Random) -> str:
    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    records = [
        {
            "name": words(5),
            "age": rng.randint(1, 99),
            "kind": rng.choice(["small", "medium", "large"]),
            "tags": [words(2) for _ in range(rng.randint(0, 4))],
            "address": {"street": words(6), "zip": words(1)},
        }
        for _ in range(ANSWER_TOKENS // 20)
    ]
    return json.dumps(records)
