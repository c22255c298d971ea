"""Which format a model writes: by the names that vLLM gave them, or by its chat template.

A template shows how calls of earlier turns are written, with the markers that the model learnt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from asyncllm.formats.answer_format import AnswerFormat
from asyncllm.formats.families import REASONING_PARSERS, TOOL_PARSERS
from asyncllm.formats.model_format import ModelFormat

AUTO = "auto"
NONE = "none"

# What is in a template -> the parser; the first line that is all there decides.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
)
_REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = ((("</think>",), "qwen3"),)


def resolve(
    chat_template: str | None,
    special_tokens: Collection[str] = (),
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ModelFormat | None:
    """None where the model is not known to write calls or reasoning in any way.

    The parsers are one of vLLM's names, `auto` or `none`. Raises `ValueError` for another name.
    """
    calls = _find(tool_parser, TOOL_PARSERS, _TOOL_SIGNS, chat_template, "tool-call")
    reasoning = _find(
        reasoning_parser, REASONING_PARSERS, _REASONING_SIGNS, chat_template, "reasoning"
    )
    if calls is None and reasoning is None:
        return None
    return ModelFormat(_joined(calls, reasoning), frozenset(special_tokens))


def _find(
    name: str,
    parsers: dict[str, AnswerFormat],
    signs: tuple[tuple[tuple[str, ...], str], ...],
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
    """The calls of one and the reasoning of the other."""
    if calls is None or reasoning is None:
        found = calls or reasoning
        assert found is not None
        return found
    return replace(
        calls,
        reasoning=reasoning.reasoning,
        channels=calls.channels or reasoning.channels,
        special=calls.special or reasoning.special,
        noise=(*calls.noise, *reasoning.noise),
    )
