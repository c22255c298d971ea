"""The formats of the families of models, and vLLM's names for them.

Facts from the models' chat templates. vLLM has a parser for reasoning and one for tool calls, and
a user may combine any two: so there are two tables here too, and `detection.py` joins the halves.
"""

from __future__ import annotations

from dataclasses import replace

from asyncllm.formats.answer_format import (
    AnswerFormat,
    CallSyntax,
    JsonCall,
    LiteralArguments,
    NamedJson,
    ReasoningMarks,
    TaggedArguments,
)

THINK = ReasoningMarks("<think>", "</think>")
THINK_ASSUMED = replace(THINK, assumed=True)

_HERMES = CallSyntax(JsonCall(), call_begin=("<tool_call>",), call_end=("</tool_call>",))
_BARE_JSON = CallSyntax(JsonCall(bare=True), separator=";", at_start=True)
_PYTHONIC = CallSyntax(LiteralArguments(), begin=("[",), separator=",", end=("]",), at_start=True)


def _json_list(begin: str, *end: str, at_start: bool = False) -> CallSyntax:
    """A JSON list of calls behind a marker."""
    begins = (begin, "[") if begin else ("[",)
    body = JsonCall(bare=not begin)
    return CallSyntax(body, begin=begins, separator=",", end=("]", *end), at_start=at_start)


def _xml(begin: str, end: str) -> CallSyntax:
    """Qwen3-Coder's, with the tag that is around a call."""
    body = TaggedArguments(
        (">",), "<parameter=", (">",), "</parameter>", lines=True, end=("</function>",)
    )
    return CallSyntax(body, call_begin=(begin, "<function="), call_end=(end,))


def _invoke(begin: str, end: str, prefix: str = "", flagged: bool = False) -> CallSyntax:
    """<invoke name="..."><parameter name="...">; `flagged`: arguments say if they are strings."""
    body = TaggedArguments(
        name_end=('">',),
        key_begin=f'<{prefix}parameter name="',
        key_end=('" string="false">',) if flagged else ('">',),
        string_key_end=('" string="true">',) if flagged else (),
        value_end=f"</{prefix}parameter>",
        end=(f"</{prefix}invoke>",),
    )
    return CallSyntax(body, begin=(begin,), call_begin=(f'<{prefix}invoke name="',), end=(end,))


_GLM = CallSyntax(
    TaggedArguments((), "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
    call_begin=("<tool_call>",),
    call_end=("</tool_call>",),
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)
_DEEPSEEK_V3 = CallSyntax(
    NamedJson(name_end=("```json",), end=("```",)),
    begin=_DEEPSEEK_SECTION[0],
    call_begin=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
    call_end=("<｜tool▁call▁end｜>",),
    end=_DEEPSEEK_SECTION[1],
)
_DEEPSEEK_V31 = CallSyntax(
    NamedJson(name_end=("<｜tool▁sep｜>",)),
    begin=_DEEPSEEK_SECTION[0],
    call_begin=("<｜tool▁call▁begin｜>",),
    call_end=("<｜tool▁call▁end｜>",),
    end=_DEEPSEEK_SECTION[1],
)
_KIMI_K2 = CallSyntax(
    NamedJson(("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),
    begin=("<|tool_calls_section_begin|>",),
    call_begin=("<|tool_call_begin|>",),
    call_end=("<|tool_call_end|>",),
    end=("<|tool_calls_section_end|>",),
)

# vLLM's --tool-call-parser -> how calls are written
TOOL_PARSERS: dict[str, AnswerFormat] = {
    "hermes": AnswerFormat(calls=(_HERMES,)),
    "qwen3_coder": AnswerFormat(calls=(_xml("<tool_call>", "</tool_call>"),)),
    "glm45": AnswerFormat(calls=(_GLM,)),
    "deepseek_v3": AnswerFormat(calls=(_DEEPSEEK_V3,), special=True),
    "deepseek_v31": AnswerFormat(calls=(_DEEPSEEK_V31,), special=True),
    "kimi_k2": AnswerFormat(calls=(_KIMI_K2,), special=True, calls_end_reasoning=True),
    "llama3_json": AnswerFormat(calls=(_BARE_JSON,)),
    "pythonic": AnswerFormat(calls=(_PYTHONIC,)),
}

# vLLM's --reasoning-parser -> what is around reasoning
REASONING_PARSERS: dict[str, AnswerFormat] = {
    "deepseek_r1": AnswerFormat(THINK_ASSUMED),
    "qwen3": AnswerFormat(THINK),
}
