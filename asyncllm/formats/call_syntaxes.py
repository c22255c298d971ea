"""Call syntaxes that several formats share: functions from markers to a `CallSyntax`.

The syntax of each model family is in `families.py`.
"""

from __future__ import annotations

from asyncllm.formats.answer_format import (
    CallSyntax,
    JsonCall,
    LiteralArguments,
    Markers,
    NamedJson,
    TaggedArguments,
)


def between(begin: str, end: str) -> CallSyntax:
    """Each call is a JSON object between two markers."""
    return CallSyntax(JsonCall(), call_begin=(begin,), call_end=(end,), separator="\n")


def json_list(begin: Markers, end: Markers = (), body: JsonCall | None = None) -> CallSyntax:
    """A JSON list of calls after a marker."""
    return CallSyntax(body or JsonCall(), begin=(*begin, "["), separator=", ", end=("]", *end))


def function_tags(begin: Markers, end: Markers) -> CallSyntax:
    """<function=name><parameter=key>value</parameter></function>, as in Qwen3-Coder."""
    body = TaggedArguments(
        (">\n",), "<parameter=", (">",), "</parameter>\n", ("</function>",), lines=True
    )
    return CallSyntax(body, call_begin=(*begin, "<function="), call_end=end, separator="\n")


def invoke_tags(
    begin: Markers,
    end: Markers,
    *,
    prefix: str = "",
    tells_strings: bool = False,
    call_begin: Markers = (),
    call_end: Markers = (),
    separator: str = "\n",
) -> CallSyntax:
    """<invoke name="..."><parameter name="...">, where strings may be marked."""
    body = TaggedArguments(
        name_end=('">\n',),
        key_begin=f'<{prefix}parameter name="',
        key_end=('" string="false">',) if tells_strings else ('">',),
        string_key_end=('" string="true">',) if tells_strings else (),
        value_end=f"</{prefix}parameter>\n",
        end=(f"</{prefix}invoke>",),
    )
    call_begin = (*call_begin, f'<{prefix}invoke name="')
    return CallSyntax(body, begin, call_begin, call_end, separator, end)


def python_list(begin: Markers = (), end: Markers = ()) -> CallSyntax:
    """[name(key='value'), ...]"""
    return CallSyntax(
        LiteralArguments(),
        begin=(*begin, "["),
        separator=", ",
        end=("]", *end),
        at_start=not begin,
    )


def gemma(begin: str, end: str, quote: str) -> CallSyntax:
    """call:name{key:<quote>value<quote>}"""
    body = LiteralArguments("{", ":", "}", ",", (quote, '"'))
    return CallSyntax(body, call_begin=(begin, "call:"), call_end=(end,))


def deepseek(
    call_begin: Markers, name_end: Markers, end: Markers = (), separator: str = ""
) -> CallSyntax:
    """A name and a JSON object, between DeepSeek's markers."""
    return CallSyntax(
        NamedJson(name_end=name_end, end=end),
        begin=("<｜tool▁calls▁begin｜>",),
        call_begin=("<｜tool▁call▁begin｜>", *call_begin),
        call_end=("<｜tool▁call▁end｜>",),
        separator=separator,
        end=("<｜tool▁calls▁end｜>",),
    )
