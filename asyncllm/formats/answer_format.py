"""Records that describe a model family's format of reasoning and tool calls.

The parser (`parser.py`) and the grammar writer (`call_grammar.py`) interpret them; a new family is
a new record in `families.py`. Markers include the white space that models write beside them. The
parser strips it, and ignores white space between markers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

Markers = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The markers around the reasoning that precedes content.

    assumed: an answer begins with reasoning if the prompt neither opened nor closed it, as models
    of the family may omit `begin`.
    """

    begin: str
    end: str
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A JSON object with the name and the arguments, in any order.

    bare: no marker precedes the call, so an object with other keys is no call, and `call_begin`
    contains its brace. name_is_key: the object is {name: arguments}.
    """

    name_keys: Markers = ("name",)
    argument_keys: Markers = ("arguments", "parameters")
    bare: bool = False
    name_is_key: bool = False
    id_key: str = ""  # key of the call's number, before the name


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, then the arguments as a JSON object.

    name_end: models may omit it before the object. prefix: written before the name. numbered: the
    name is followed by ":0", which counts the calls; prefix, name and number are the call's id.
    id_begin: the call's id may follow this.
    """

    name_end: Markers = ()
    prefix: str = ""
    numbered: bool = False
    id_begin: str = ""
    end: Markers = ()


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """The name, then each argument between tags: strings unquoted, other values as JSON.

    key_end: written after an argument's name. string_key_end: written instead before strings, if
    the format distinguishes them. lines: values have a line break before and after.
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
    quotes: Markers = ("'", '"')  # of one character; backslashes escape as in Python


CallBody = JsonCall | NamedJson | TaggedArguments | LiteralArguments


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """begin (call_begin BODY call_end) separator (...) end.

    at_start: its first marker is only a bracket, so calls are expected only at the beginning of an
    answer. A separator may be missing before a `call_begin`; separators of white space are used by
    the grammar writer only.
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
        """Whether its beginning cannot be other text."""
        return not (self.at_start or (isinstance(self.body, JsonCall) and self.body.bare))

    @property
    def beginnings(self) -> tuple[Markers, ...]:
        """Texts that may precede the first body; some models omit `begin`."""
        whole = self.begin + self.call_begin
        return (whole, self.call_begin) if self.begin and self.call_begin else (whole,)

    @property
    def ends(self) -> Markers:
        """Texts that may remain of an incomplete call."""
        body = self.body
        inner = body.end if isinstance(body, NamedJson | TaggedArguments) else ()
        return inner + self.call_end + self.end

    def without_spaces(self) -> CallSyntax:
        """The syntax as the parser uses it."""
        stripped = _stripped(self)
        assert isinstance(stripped, CallSyntax)
        return stripped

    @property
    def markers(self) -> Markers:
        return (*self.begin, *self.call_begin, *self.ends, self.separator)


@dataclass(frozen=True, slots=True)
class ChannelSyntax:
    """Messages with headers (OpenAI's harmony) that name author, recipient and channel.

    begins: open a header. message: closes it. ends: close the message.
    """

    begins: Markers
    message: str
    ends: Markers
    reasoning: str  # the channel of reasoning
    recipient: str  # written before the name of the called tool
    final: str  # the channel of content for the user

    @property
    def resumed(self) -> str:
        """The text between the end of a message and the next header's channel."""
        return f"{self.begins[0]}assistant"

    def header(self, channel: str) -> str:
        """The header up to the message."""
        return f"{self.begins[-1]}{channel}{self.message}"

    @property
    def markers(self) -> Markers:
        return (*self.begins, self.message, *self.ends)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """calls: the syntaxes that the parser reads; grammars write the first one. noise: further
    markers without a meaning, which are removed.
    """

    reasoning: ReasoningMarks | None = None
    calls: tuple[CallSyntax, ...] = ()
    channels: ChannelSyntax | None = None
    noise: Markers = ()
    calls_end_reasoning: bool = False
    short_ids: bool = False  # call ids of nine letters and digits (Mistral)

    @property
    def markers(self) -> frozenset[str]:
        """All markers, which may be or contain special tokens of a tokenizer."""
        found = [marker for call in self.calls for marker in call.markers]
        if self.reasoning is not None:
            found += [self.reasoning.begin, self.reasoning.end]
        if self.channels is not None:
            found += self.channels.markers
        return frozenset(found) - {""}


def _stripped(value: Any) -> Any:
    """A record with its markers stripped, and without markers of white space only."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, tuple):
        return tuple(filter(None, map(_stripped, value)))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _stripped(getattr(value, f.name)) for f in fields(value)})
    return value
