"""A format of the content, in answers made of messages: random walks that the parser reads back."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from asyncllm.engine.structured.grammar_text import grammar_text
from asyncllm.formats import ModelFormat, resolve
from asyncllm.formats.tools import ToolChoice
from asyncllm.server.inputs.output_format import chat_structure
from asyncllm.server.inputs.prompts import ToolUse
from asyncllm.server.protocol import ChatRequest, JsonSchema, JsonSchemaFormat
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.formats.answers import read
from tests.formats.test_call_grammar import SCHEMAS, TOOLS, special_markers, tokenizer, walk

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", "place"]}},
    "required": ["on", "colour"],
    "additionalProperties": False,
}
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
SPECIAL = special_markers("openai")


def harmony(special: frozenset[str]) -> ModelFormat:
    raw, _ = tokenizer(special)
    ids = {token.content: i for i, token in raw.get_added_tokens_decoder().items() if token.special}
    found = resolve(None, ids, tool_parser="openai", reasoning_parser="openai_gptoss")
    assert found is not None
    return found


def structure(
    found: ModelFormat, tools: ToolUse, prompt: str = PROMPT, prefix: str = ""
) -> StructuredOutputsParams:
    asked = JsonSchemaFormat(JsonSchema("a", schema=SCHEMA))
    request = ChatRequest(messages=[], response_format=asked)
    params = chat_structure(request, tools, found, prompt, prefix, may_reason=True)
    assert params is not None
    return params


@pytest.mark.parametrize("special", [SPECIAL, frozenset()])
def test_the_format_is_that_of_the_final_channel(special: frozenset[str]) -> None:
    found, reasoned = harmony(special), set()
    grammar = grammar_text(structure(found, ToolUse()), found.special_tokens)
    for seed in range(12):
        text = walk(grammar, special, random.Random(seed))
        assert "<|channel|>final<|message|>" in text
        answer = read(lambda: found.parser(prompt=PROMPT), [text])
        jsonschema.validate(json.loads(answer.content), SCHEMA)
        reasoned.add("<|end|>" in text)
    assert reasoned == {True, False}


def test_a_message_that_is_gone_on_with_has_no_header() -> None:
    found = harmony(SPECIAL)
    params = structure(found, ToolUse(), PROMPT + '<|channel|>final<|message|>{"on', '{"on')
    assert params.after is None


def test_it_is_calls_or_content_of_that_format() -> None:
    found, kinds = harmony(SPECIAL), set()
    params = structure(found, ToolUse((), ToolChoice(TOOLS)))
    grammar = grammar_text(params, found.special_tokens)
    for seed in range(24):
        text = walk(grammar, SPECIAL, random.Random(seed))
        answer = read(lambda: found.parser(TOOLS, PROMPT), [text])
        kinds.add((bool(answer.calls), "<|end|>" in text))
        if not answer.calls:
            jsonschema.validate(json.loads(answer.content), SCHEMA)
        for name, arguments in answer.calls:
            assert answer.content == ""
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
