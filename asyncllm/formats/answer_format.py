"""One model family's format of reasoning and tool calls: data only.

One parser (`parser.py`) and one grammar writer (`call_grammar.py`) are driven by these records; a
new family is a new record in `families.py`. Markers are spelt with the white space that the models
write beside them. A reader does without: it ignores white space between one marker and the next.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

Markers = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The markers around the reasoning that precedes content.

    `assumed`: it is open where the prompt neither opened nor closed it, as the family's models
    may leave `begin` out.
    """

    begin: str
    end: str
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object that holds the name and the arguments, in any order.

    `bare`: no marker says that it is a call, so it is none if other keys are in it, and its brace
    stands in `call_begin`. `name_is_key`: it is {name: arguments}.
    """

    name_keys: Markers = ("name",)
    argument_keys: Markers = ("arguments", "parameters")
    bare: bool = False
    name_is_key: bool = False
    id_key: str = ""  # before the name stands the call's number


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, then the arguments as a JSON object.

    `name_end` may be missing where the object follows at once. `prefix` is written before the
    name. `numbered`: ":0" follows it and counts the calls, and prefix, name and number together
    are the call's id. `id_begin`: the call's id may be written after this.
    """

    name_end: Markers = ()
    prefix: str = ""
    numbered: bool = False
    id_begin: str = ""
    end: Markers = ()


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """The name, then each argument between tags.

    Strings stand there as they are, everything else as JSON. `key_end` is written after an
    argument's name; where it marks itself whether a string follows, `string_key_end` is written
    instead for those. `lines`: values have a line break of their own before and after.
    """

    name_end: Markers
    key_begin: str
    key_end: Markers
    value_end: str
    end: Markers
    string_key_end: Markers = ()
    lines: bool = False


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """The name, then arguments as literals: `name(key='text', other=[1, None])`."""

    open: str = "("
    assign: str = "="
    close: str = ")"
    separator: str = ", "
    quotes: Markers = ("'", '"')  # of one character: backslashes mean what they mean in Python


CallBody = JsonCall | NamedJson | TaggedArguments | LiteralArguments


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """begin (call_begin BODY call_end) separator (...) end.

    `at_start`: its first marker is a mere bracket, so calls are looked for only where an answer
    begins. A separator may be missing where `call_begin` says that a call follows; one of nothing
    but white space only the writer knows.
    """

    body: CallBody
    begin: Markers = ()
    call_begin: Markers = ()
    call_end: Markers = ()
    separator: str = ""
    end: Markers = ()
    at_start: bool = False

    @property
    def is_marked(self) -> bool:
        """Its beginning is of no other text."""
        return not (self.at_start or (isinstance(self.body, JsonCall) and self.body.bare))

    @property
    def beginnings(self) -> tuple[Markers, ...]:
        """Texts that may precede the first body; some models forget `begin`."""
        whole = self.begin + self.call_begin
        return (whole, self.call_begin) if self.begin and self.call_begin else (whole,)

    @property
    def ends(self) -> Markers:
        """Texts that may remain of a call that broke off."""
        body = self.body
        inner = body.end if isinstance(body, NamedJson | TaggedArguments) else ()
        return inner + self.call_end + self.end

    def without_spaces(self) -> CallSyntax:
        """As a reader looks for it."""
        stripped = _stripped(self)
        assert isinstance(stripped, CallSyntax)
        return stripped

    @property
    def markers(self) -> Markers:
        return (*self.begin, *self.call_begin, *self.ends, self.separator)


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
    final: str  # the channel of content for the user

    @property
    def resumed(self) -> str:
        """The text between the end of a message and the next header's channel."""
        return f"{self.begins[0]}assistant"

    def header(self, channel: str) -> str:
        """Up to the message."""
        return f"{self.begins[-1]}{channel}{self.message}"

    @property
    def markers(self) -> Markers:
        return (*self.begins, self.message, *self.ends)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`calls` are the syntaxes that a parser reads; a grammar writes the first of them.

    `noise`: further markers, which mean nothing and are removed.
    """

    reasoning: ReasoningMarks | None = None
    calls: tuple[CallSyntax, ...] = ()
    channels: ChannelSyntax | None = None
    noise: Markers = ()
    calls_end_reasoning: bool = False
    short_ids: bool = False  # nine letters and digits (Mistral)

    @property
    def markers(self) -> frozenset[str]:
        """All that may be special tokens of a tokenizer, or hold them."""
        found = [marker for call in self.calls for marker in call.markers]
        if self.reasoning is not None:
            found += [self.reasoning.begin, self.reasoning.end]
        if self.channels is not None:
            found += self.channels.markers
        return frozenset(found) - {""}


def _stripped(value: Any) -> Any:
    """Records without the white space in their markers, and without markers of nothing else."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, tuple):
        return tuple(filter(None, map(_stripped, value)))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _stripped(getattr(value, f.name)) for f in fields(value)})
    return value
