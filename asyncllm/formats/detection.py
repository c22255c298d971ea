"""Chooses a model's format by vLLM's parser names, or detects it from the chat template.

A template writes the calls of earlier turns, with the markers that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from asyncllm.formats.answer_format import (
    AnswerFormat,
    CallBody,
    CallSyntax,
    NamedJson,
    TaggedArguments,
)
from asyncllm.formats.families import REASONING_PARSERS, TOOL_PARSERS
from asyncllm.formats.model_format import ModelFormat
from asyncllm.formats.response_template import read_response_template

AUTO = "auto"
NONE = "none"

# Texts of a template -> the parser. The first entry whose texts all occur is used.
_Signs = tuple[tuple[tuple[str, ...], str], ...]
_TOOL_SIGNS: _Signs = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("<｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<｜tool_calls_begin｜>",), "step3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<tool_sep>", "<arg_key>"), "hy_v3"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call:start|>",), "solar_open2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<|action_start|>",), "internlm"),
    (("<|function_call|>",), "gigachat3"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "jamba"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("functools[",), "phi4_mini_json"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
_REASONING_SIGNS: _Signs = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("<|channel>thought",), "gemma4"),
    (("<seed:think>",), "seed_oss"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|think:start|>",), "solar_open2"),
    (("[THINK]",), "mistral"),
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>",), "qwen3"),
)


def resolve(
    chat_template: str | None,
    special_tokens: Mapping[str, int] | None = None,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    response_template: object = None,
) -> ModelFormat | None:
    """The model's format; None if it is not known to write calls or reasoning.

    special_tokens: the tokenizer's, text to id. The parsers are vLLM's names, `auto` or `none`.
    response_template: the tokenizer's description of its format, which takes precedence over its
    chat template. Raises `ValueError` for an unknown name.
    """
    calls = _find(tool_parser, TOOL_PARSERS, _TOOL_SIGNS, chat_template, "tool-call")
    reasoning = _find(
        reasoning_parser, REASONING_PARSERS, _REASONING_SIGNS, chat_template, "reasoning"
    )
    declared = read_response_template(response_template) or AnswerFormat()
    if tool_parser == AUTO and declared.calls and not _same_calls(calls, declared):
        calls = replace(declared, reasoning=None)
    if reasoning_parser == AUTO and declared.reasoning:
        reasoning = AnswerFormat(declared.reasoning)
    if calls is None and reasoning is None:
        return None
    found, special = _joined(calls, reasoning), special_tokens or {}
    is_marked = any(token in marker for marker in found.markers for token in special)
    return ModelFormat(found, special if is_marked else {})


def _same_calls(known: AnswerFormat | None, declared: AnswerFormat) -> bool:
    """Whether `known`, whose record has more details, reads all declared calls."""
    shapes = [_shape(call) for call in known.calls] if known else []
    return all(_shape(call) in shapes for call in declared.calls)


def _shape(call: CallSyntax) -> tuple[str, str, CallBody]:
    """A syntax with its markers joined, to compare syntaxes."""
    read = call.without_spaces()
    body = read.body
    bare = replace(body, end=()) if isinstance(body, NamedJson | TaggedArguments) else body
    return "".join(read.begin + read.call_begin), "".join(read.ends), bare


def _find(
    name: str,
    parsers: dict[str, AnswerFormat],
    signs: _Signs,
    chat_template: str | None,
    kind: str,
) -> AnswerFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        if name not in parsers:
            known = ", ".join([AUTO, NONE, *sorted(parsers)])
            raise ValueError(f"{kind} parser {name!r} is not known: one of {known}")
        return parsers[name]
    template = chat_template or ""
    found = (parser for words, parser in signs if all(word in template for word in words))
    return next((parsers[parser] for parser in found), None)


def _joined(calls: AnswerFormat | None, reasoning: AnswerFormat | None) -> AnswerFormat:
    """A format with the calls of one and the reasoning of the other."""
    if calls is None or reasoning is None:
        found = calls or reasoning
        assert found is not None
        return found
    return replace(
        calls,
        reasoning=reasoning.reasoning,
        channels=calls.channels or reasoning.channels,
        noise=(*calls.noise, *reasoning.noise),
    )
