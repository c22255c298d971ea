"""How one family of models writes reasoning and tool calls: data only.

One parser (`parser.py`) and one grammar writer (`grammar.py`) are driven by these records; a new
family is a new record in `families.py`. A tuple of markers is written one after the other, with or
without white space between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Markers = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What is around the thinking that precedes an answer.

    `assumed`: it is open where the prompt neither opened nor closed it, as the family's models
    may leave `begin` out.
    """

    begin: str
    end: str
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object that holds the name and the arguments, in any order.

    `bare`: no marker says that it is a call, so it is none if other keys are in it.
    """

    name_keys: Markers = ("name",)
    argument_keys: Markers = ("arguments", "parameters")
    bare: bool = False


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, then the arguments as a JSON object.

    `prefix` is written before the name. `numbered`: ":0" follows it and counts the calls, and
    prefix, name and number together are the call's id.
    """

    name_end: Markers = ()
    prefix: str = ""
    numbered: bool = False
    end: Markers = ()


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """The name, then each argument between tags.

    Strings stand there as they are, everything else as JSON. `key_end` is written after an
    argument's name; where it says itself whether a string follows, `string_key_end` is written
    instead for those. `lines`: values have a line break of their own before and after.
    """

    name_end: Markers
    key_begin: str
    key_end: Markers
    value_end: str
    string_key_end: Markers = ()
    lines: bool = False
    end: Markers = ()


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """The name, then arguments as literals: `name(key='text', other=[1, None])`."""

    open: str = "("
    assign: str = "="
    close: str = ")"
    quotes: Markers = ("'", '"')
    escapes: bool = True  # a backslash in a text means what it means in Python


CallBody = JsonCall | NamedJson | TaggedArguments | LiteralArguments


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """begin (call_begin BODY call_end) separator (...) end.

    With no marker at all in `begin` and `call_begin`, or one that is a plain bracket, calls are
    looked for only where the answer begins: `at_start`.
    """

    body: CallBody
    begin: Markers = ()
    call_begin: Markers = ()
    call_end: Markers = ()
    separator: str = ""
    end: Markers = ()
    at_start: bool = False

    @property
    def trigger(self) -> str:
        """The first thing that is written; "" where that is the body's own."""
        return next(iter(self.begin + self.call_begin), "")


@dataclass(frozen=True, slots=True)
class ChannelSyntax:
    """Messages with headers (OpenAI's harmony): who speaks, to whom, on which channel.

    `begins` open a header, `message` closes it, `ends` close the message.
    """

    begins: Markers
    message: str
    ends: Markers
    reasoning: str  # this channel's messages are reasoning
    recipient: str  # before the name of the tool that a message calls


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`calls` are the ways that a parser reads; a grammar writes the first of them.

    `special`: some markers are special tokens, so the text must keep those
    (skip_special_tokens=False); the parser removes what is left of them.
    `noise`: further markers that mean nothing and are removed.
    """

    reasoning: ReasoningMarks | None = None
    calls: tuple[CallSyntax, ...] = ()
    channels: ChannelSyntax | None = None
    special: bool = False
    noise: Markers = ()
    calls_end_reasoning: bool = False
    short_ids: bool = field(default=False, kw_only=True)  # nine letters and digits (Mistral)
