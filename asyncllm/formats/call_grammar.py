"""Grammars of tool calls, for requests that require a call or have strict tools.

Calls are written in the first syntax of the family, so that the parser can read them. Arguments
satisfy the tool's schema. As JSON they satisfy all of it (for a tool that is not `strict`, without
the keywords that llguidance cannot enforce). Between tags or as literals they are checked one by
one, in the order of the schema; texts of a strict tool satisfy its lengths, patterns and formats,
others are any texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncllm.formats.answer_format import (
    AnswerFormat,
    CallSyntax,
    ChannelSyntax,
    JsonCall,
    LiteralArguments,
    NamedJson,
    TaggedArguments,
)
from asyncllm.formats.argument_grammar import literal_arguments, tagged_arguments
from asyncllm.formats.lark_text import ANY_TEXT, LarkText
from asyncllm.formats.tools import Tool, ToolChoice

_DIGITS = "/[0-9]{1,4}/"


def call_grammar(
    answer_format: AnswerFormat,
    choice: ToolChoice,
    special_ids: Mapping[str, int],
    parallel: bool = True,
) -> str | None:
    """Lark for llguidance, for the text after the reasoning; None if no call is required and no
    tool is strict.

    Raises `InvalidRequestError` for a strict tool whose parameters this format cannot enforce.
    """
    if not choice.required and not any(tool.strict for tool in choice.tools):
        return None
    lark = LarkText(special_ids)
    if answer_format.channels is not None:
        return lark.build(_channel_call(lark, answer_format.channels, choice))
    writer = _CallWriter(lark, written_syntax(answer_format, special_ids), choice.tools)
    if choice.required:
        return lark.build(writer.calls(parallel))
    return lark.build(writer.text_and_calls(parallel))


class _CallWriter:
    def __init__(self, lark: LarkText, syntax: CallSyntax, tools: Sequence[Tool]) -> None:
        self._lark = lark
        self._syntax = syntax
        self._any_call = lark.any_of(self._body(tool) for tool in tools)

    def calls(self, parallel: bool, trigger: str = "") -> str:
        """One or more calls. trigger: the beginning of the first, which is written already."""
        syntax, literal = self._syntax, self._lark.literal
        call_begin, call_end = "".join(syntax.call_begin), "".join(syntax.call_end)
        begin = ("".join(syntax.begin) + call_begin).removeprefix(trigger)
        parts = [literal(begin), self._any_call, literal(call_end)]
        if parallel and (syntax.separator or syntax.end or call_begin):
            separator = literal(syntax.separator + call_begin)
            parts.append(f"({separator} {self._any_call} {literal(call_end)})*")
        parts.append(literal("".join(syntax.end)))
        return self._lark.rule(" ".join(filter(None, parts)))

    def text_and_calls(self, parallel: bool) -> str:
        """Any text; the beginning of a call must be followed by the rest of the call."""
        trigger = (self._syntax.begin + self._syntax.call_begin)[0].strip()
        if len(trigger) == 1:  # a bracket, which is a call only at the beginning of the answer
            other = self._lark.rule(f"/[^\\{trigger}\\s]{ANY_TEXT}/")
            return f"({self.calls(parallel)} | {other})?"
        call = f"{self._lark.text_until(trigger)} {self.calls(parallel, trigger)}"
        repeat = "*" if parallel else "?"
        return f"({call}){repeat} {self._lark.rule(f'/{ANY_TEXT}/')}"

    def _body(self, tool: Tool) -> str:
        lark, body = self._lark, self._syntax.body
        match body:
            case JsonCall():
                return lark.rule(self._json_call(body, tool))
            case NamedJson():
                number = _DIGITS if body.numbered else ""
                name = lark.literal(body.prefix + tool.name + ":" * body.numbered)
                arguments = lark.json(tool.parameters, tool.strict)
                ends = [lark.literal("".join(words)) for words in (body.name_end, body.end)]
                return lark.rule(f"{name} {number} {ends[0]} {arguments} {ends[1]}")
            case TaggedArguments():
                return tagged_arguments(lark, body, tool)
            case LiteralArguments():
                return literal_arguments(lark, body, tool)

    def _json_call(self, body: JsonCall, tool: Tool) -> str:
        literal = self._lark.literal
        arguments = self._lark.json(tool.parameters, tool.strict)
        brace = "" if body.bare else "{"
        if body.name_is_key:
            return f'{literal(f"{brace}{_quoted(tool.name)}: ")} {arguments} "}}"'
        number = ""
        if body.id_key:
            number = f'{literal(f"{brace}{_quoted(body.id_key)}: ")} "\\"" {_DIGITS}'
            brace = '", '
        name = f"{_quoted(body.name_keys[0])}: {_quoted(tool.name)}"
        head = literal(f"{brace}{name}, {_quoted(body.argument_keys[0])}: ")
        return f'{number} {head} {arguments} "}}"'


def _channel_call(lark: LarkText, channels: ChannelSyntax, choice: ToolChoice) -> str:
    """A message to a tool, after an optional message of reasoning. Its end ends the answer."""
    calls = []
    for tool in choice.tools:
        address = f"commentary {channels.recipient}{tool.name} <|constrain|>json"
        arguments = lark.json(tool.parameters, tool.strict)
        calls.append(lark.rule(f"{lark.literal(channels.header(address))} {arguments}"))
    answer = lark.any_of(calls)
    if not choice.required:
        final = lark.rule(f"{lark.literal(channels.header(channels.final))} /{ANY_TEXT}/")
        answer = lark.any_of([answer, final])
    thinking = lark.literal(channels.header(channels.reasoning))
    end, resumed = lark.text_until(channels.ends[0]), lark.literal(channels.resumed)
    return f"({thinking} {end} {resumed})? {answer}"


def written_syntax(answer_format: AnswerFormat, special_ids: Mapping[str, int]) -> CallSyntax:
    """The syntax of the format that has the most special tokens of this tokenizer."""

    def num_special(syntax: CallSyntax) -> int:
        return sum(token in marker for marker in syntax.markers for token in special_ids)

    return max(answer_format.calls, key=num_special)  # the first one of several


def _quoted(name: str) -> str:
    return f'"{name}"'
