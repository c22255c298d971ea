"""The built-in model: its format is found, and it answers with calls and records that are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import asyncllm
from asyncllm import LLM, SamplingParams
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.formats import resolve
from asyncllm.formats.tools import ToolChoice, parse_tools
from asyncllm.structured_outputs import StructuredOutputsParams
from tests.formats.answers import Answer, read

TINY = Path(asyncllm.__file__).parent / "assets" / "tiny"
TOKENIZER = Tokenizer.from_folder(TINY)
WEATHER = {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}}
RAW_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather.",
            "parameters": {"type": "object", "properties": WEATHER, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "description": "Start a timer.",
            "parameters": {
                "type": "object",
                "properties": {"minutes": {"type": "integer"}},
                "required": ["minutes"],
            },
        },
    },
]
TOOLS = parse_tools(RAW_TOOLS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_gpu_blocks_override=64, swap_space=0) as engine:
        yield engine


def ask(
    llm: LLM,
    question: str,
    raw_tools: list[dict[str, Any]] | None = None,
    structure: StructuredOutputsParams | None = None,
    **template_kwargs: Any,
) -> Answer:
    """A greedy answer, read by the parser of the format that the chat template shows."""
    model_format = resolve(TOKENIZER.chat_template, TOKENIZER.special_tokens)
    assert model_format is not None
    message = {"role": "user", "content": question}
    prompt = TOKENIZER.render_chat([message], raw_tools, template_kwargs=template_kwargs)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=structure)
    output = llm.generate(
        [{"prompt": prompt, "add_special_tokens": False}], params, use_tqdm=False
    )[0].outputs[0]
    assert output.finish_reason == "stop"
    tools = parse_tools(raw_tools)
    return read(lambda: model_format.parser(tools, prompt), [output.text])


def test_a_correct_call(llm: LLM) -> None:
    answer = ask(llm, "What is the weather in Oslo?", RAW_TOOLS)
    assert answer.parsed_calls == [("get_weather", {"city": "Oslo"})]
    assert (answer.content, answer.reasoning) == ("", "")


def test_a_call_after_reasoning(llm: LLM) -> None:
    answer = ask(llm, "Set a timer for 5 minutes.", RAW_TOOLS, enable_thinking=True)
    assert answer.parsed_calls == [("set_timer", {"minutes": 5})]
    assert answer.reasoning == "I need the function set_timer."


def test_no_call_where_none_fits(llm: LLM) -> None:
    answer = ask(llm, "What is the capital of France?", RAW_TOOLS)
    assert answer.calls == [] and "Paris" in answer.content


def test_a_call_that_is_required(llm: LLM) -> None:
    model_format = resolve(TOKENIZER.chat_template)
    assert model_format is not None
    grammar = model_format.call_grammar(ToolChoice(TOOLS[1:], required=True), parallel=False)
    structure = StructuredOutputsParams(grammar=grammar)
    answer = ask(llm, "What is the weather in Oslo?", RAW_TOOLS, structure)
    assert [name for name, _ in answer.calls] == ["set_timer"]
    for (_, arguments), tool in zip(answer.parsed_calls, TOOLS[1:], strict=True):
        jsonschema.validate(arguments, tool.parameters)


def test_a_json_record(llm: LLM) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    structure = StructuredOutputsParams(json=schema)
    answer = ask(llm, "Write this as JSON: Anna is 31 years old.", structure=structure)
    record = json.loads(answer.content)
    jsonschema.validate(record, schema)
    assert record == {"name": "Anna", "age": 31}
